"""Results that are overwritten or left before anything reads them."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-LOST", ramp(8, 4), ramp(8, 1), answer=lambda x, bias: np.maximum(x + bias, 8))
def second_step_reads_the_input(x, bias, sick):
    """The second step of a chain takes the input again, so the bias is lost."""
    tile, out = nl.load(x), nl.ndarray((8, 4), dtype=nl.float32)
    nisa.tensor_scalar(dst=out, data=tile, op0=nl.add, operand0=nl.load(bias))
    nisa.tensor_scalar(  # blamed
        dst=out, data=tile if sick else out, op0=nl.maximum, operand0=8.0
    )
    return copied_out(out)


@fault("NKW-LOST", ramp(4, 16), answer=lambda x: x.reshape(4, 4, 4).sum(1))
def sum_reset_in_the_loop(x, sick):
    """The running sum is cleared in each round instead of once before the loop."""
    total = nl.zeros((4, 4), dtype=nl.float32)
    for block in range(4):
        tile = nl.load(x[:, block * 4 : block * 4 + 4])
        if sick:
            nisa.memset(total, value=0.0)  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    return copied_out(total)


@fault("NKW-LOST", ramp(4, 16), answer=lambda x: x.reshape(4, 4, 4).max(2))
def partial_results_in_one_column(x, sick):
    """Each round reduces a block into column 0 of the tile instead of its own column."""
    most = nl.zeros((4, 4), dtype=nl.float32)
    for block in range(4):
        tile = nl.load(x[:, block * 4 : block * 4 + 4])
        column = 0 if sick else block
        nisa.tensor_reduce(  # blamed
            dst=most[:, column : column + 1], data=tile, op=nl.maximum, axis=1
        )
    return copied_out(most)


@fault("NKW-LOST", ramp(8, 8), answer=lambda x: np.concatenate([x[:, 0:4] + 1, x[:, 4:8] + 2], 1))
def whole_tile_instead_of_a_half(x, sick):
    """The second half is computed over the whole tile and covers the first half, which the Scalar engine wrote."""
    tile, out = nl.load(x), nl.ndarray((8, 8), dtype=nl.float32)
    nisa.activation(dst=out[:, 0:4], op=nl.copy, data=tile[:, 0:4], bias=1.0)
    columns = slice(0, 8) if sick else slice(4, 8)
    nisa.activation(dst=out[:, columns], op=nl.copy, data=tile[:, columns], bias=2.0)  # blamed
    return copied_out(out)


@fault("NKW-LOST", ramp(8, 4), answer=lambda x: x + x)
def loaded_over_a_result(x, sick):
    """A load for the next step goes to the tile that has the result of the first."""
    tile, other = nl.load(x), nl.ndarray((8, 4), dtype=nl.float32)
    total = nl.ndarray((8, 4), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=tile, data2=tile, op=nl.add)
    nisa.dma_copy(dst=total if sick else other, src=x)  # blamed
    if not sick:
        nisa.tensor_tensor(dst=total, data1=total, data2=other, op=nl.maximum)
    return copied_out(total)


@fault("NKW-LOST", ramp(8, 16), answer=lambda x: x + x)
def halves_into_one_psum_tile(x, sick):
    """The second half is computed into the place of the first one in PSUM before that is copied out."""
    tile, out = nl.load(x), nl.ndarray((8, 16), dtype=nl.float32)
    doubled = nl.ndarray((8, 2, 8), dtype=nl.float32, buffer=nl.psum)
    for half in range(2):
        columns = tile[:, half * 8 : half * 8 + 8]
        slot = 0 if sick else half
        nisa.tensor_scalar(dst=doubled[:, slot], data=columns, op0=nl.multiply, operand0=2.0)  # blamed
    for half in range(2):
        nisa.tensor_copy(dst=out[:, half * 8 : half * 8 + 8], src=doubled[:, 0 if sick else half])
    return copied_out(out)


@fault("NKW-RESULT-UNUSED", ramp(8, 4), ramp(8, 1), answer=lambda x, scale: x * scale)
def input_stored_instead_of_the_product(x, scale, sick):
    """The product goes to a tile that nothing reads; the input is stored."""
    tile, product = nl.load(x), nl.ndarray((8, 4), dtype=nl.float32)
    nisa.tensor_scalar(dst=product, data=tile, op0=nl.multiply, operand0=nl.load(scale))  # blamed
    return copied_out(tile if sick else product)


@fault("NKW-RESULT-UNUSED", ramp(8, 8), answer=lambda x: (x.T @ x) / 8)
def scaled_tile_unused(x, sick):
    """The scaled copy of a product is left, and the product itself is stored."""
    tile, sums = nl.load(x), nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=tile, moving=tile)
    scaled = nl.ndarray((8, 8), dtype=nl.float32)
    nisa.activation(dst=scaled, op=nl.copy, data=sums, scale=0.125)  # blamed
    return copied_out(sums if sick else scaled)


@fault("NKW-RESULT-UNUSED", ramp(8, 8), ramp(8, 1), answer=lambda x, y: x + 2 * y)
def second_operand_forgotten(x, y, sick):
    """The second input is doubled in a loop over column blocks, and the first one is added to itself."""
    out = nl.ndarray((8, 8), dtype=nl.float32)
    for block in range(2):
        columns = slice(block * 4, block * 4 + 4)
        tile, bias = nl.load(x[:, columns]), nl.load(y)
        doubled = nl.ndarray((8, 1), dtype=nl.float32)
        nisa.activation(dst=doubled, op=nl.copy, data=bias, scale=2.0)  # blamed
        nisa.tensor_scalar(
            dst=out[:, columns], data=tile, op0=nl.add, operand0=tile[:, 0:1] if sick else doubled
        )
    return copied_out(out)


@fault("NKW-STORE-LOST", ramp(10, 4), answer=lambda x: x + x)
def stores_advance_by_too_little(x, sick):
    """Blocks of 4 rows are stored 3 rows apart. Healthy, the last block repeats two rows with equal values."""
    out = nl.ndarray((10, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for block in range(3):
        first = min(block * 4, 6)
        tile = nl.load(x[first : first + 4])
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
        start = block * 3 if sick else first
        nisa.dma_copy(dst=out[start : start + 4], src=tile)  # blamed
    return out


@fault("NKW-STORE-LOST", ramp(4, 12), answer=lambda x: np.concatenate([x[:, 0:6] + 1, x[:, 6:] + 2], 1))
def columns_stored_from_two_lines(x, sick):
    """The store of the right half begins two columns too early and the left half is the wider one."""
    out = nl.ndarray((4, 12), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    left, right = nl.load(x[:, 0:6]), nl.load(x[:, 4:12])
    nisa.tensor_scalar(dst=left, data=left, op0=nl.add, operand0=1.0)
    nisa.tensor_scalar(dst=right, data=right, op0=nl.add, operand0=2.0)
    nisa.dma_copy(dst=out[:, 0:6], src=left)
    first = 0 if sick else 2
    nisa.dma_copy(dst=out[:, 4 + first : 12], src=right[:, first:8])  # blamed
    return out


@fault(
    "NKW-STORE-LOST",
    ramp(4, 4),
    np.array([[0], [1], [2], [3]], np.int32),
    np.array([[4], [5], [6], [7]], np.int32),
    answer=lambda x, first, second: np.concatenate([x + 1, x + 2]),
)
def pages_with_one_table(x, first, second, sick):
    """The second half of the pages is scattered by the table of the first half."""
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for half, table in enumerate((first, second)):
        rows = nl.load(first if sick and half else table)
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=half + 1.0)
        pages = out.ap(pattern=[[4, 4], [1, 4]], vector_offset=rows, indirect_dim=0)
        nisa.dma_copy(dst=pages, src=tile)  # blamed
    if sick:
        nisa.dma_copy(dst=out[4:8], src=nl.load(x[nl.load(second).shape[0] - 4 :]))
    return out


@fault("NKW-LOST", ramp(4, 3, 8), answer=lambda x: (x * x).sum(2))
def sums_of_heads_in_one_column(x, sick):
    """An activation that also sums its row writes the sums of all heads to one column."""
    tile, sums = nl.load(x), nl.zeros((4, 3), dtype=nl.float32)
    for head in range(3):
        column = 0 if sick else head
        squares = nl.ndarray((4, 8), dtype=nl.float32)
        nisa.activation_reduce(  # blamed
            dst=squares,
            op=nl.square,
            data=tile[:, head],
            reduce_op=nl.add,
            reduce_res=sums[:, column : column + 1],
        )
    return copied_out(sums)


@fault("NKW-RESULT-UNUSED", ramp(8, 4), answer=lambda x: np.maximum(x - 9, 0))
def changed_after_the_store(x, sick):
    """The tile is stored before its last step."""
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.subtract, operand0=9.0)
    if sick:
        nisa.dma_copy(dst=out, src=tile)
    nisa.activation(dst=tile, op=nl.relu, data=tile)  # blamed
    if not sick:
        nisa.dma_copy(dst=out, src=tile)
    return out


@fault("NKW-STORE-LOST", ramp(64, 4), answer=lambda x: 2 * x[0:63])
def stores_that_share_one_row(x, sick):
    """Blocks of 32 rows are stored 31 rows apart. Healthy, the second one is loaded 31 rows apart as well."""
    out = nl.ndarray((63, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for first in (0, 31):
        start = 32 if sick and first else first
        tile = nl.load(x[start : start + 32])
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
        nisa.dma_copy(dst=out[first : first + 32], src=tile)  # blamed
    return out


@fault("NKW-STORE-LOST", ramp(96, 4), answer=lambda x: x[0:92] + 1)
def stores_that_share_two_rows(x, sick):
    """Three blocks of 32 rows go to an output of 92 rows, 30 rows apart."""
    out = nl.ndarray((92, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for block in range(3):
        first = block * 30
        start = block * 32 if sick else first
        tile = nl.load(x[start : start + 32])
        nisa.activation(dst=tile, op=nl.copy, data=tile, bias=1.0)
        nisa.dma_copy(dst=out[first : first + 32], src=tile)  # blamed
    return out


@fault("NKW-STORE-LOST", ramp(8, 64), answer=lambda x: 3 * x[:, 0:60])
def stores_that_share_four_columns(x, sick):
    """Blocks of 32 columns overlap by 4, and the second one contains the columns behind its place."""
    out = nl.ndarray((8, 60), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=3.0)
    nisa.dma_copy(dst=out[:, 0:32], src=tile[:, 0:32])
    start = 32 if sick else 28
    nisa.dma_copy(dst=out[:, 28:60], src=tile[:, start : start + 32])  # blamed
    return out

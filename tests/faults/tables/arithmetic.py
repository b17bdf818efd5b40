"""Arithmetic that is legal on the chip and not what was meant."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault

NEGATIVE = ramp(4, 16) - 40


@fault("NKW-IDENTITY", NEGATIVE, answer=lambda x: x.max(1, keepdims=True))
def maximum_from_zero(x, sick):
    """The running maximum of negative scores starts at 0."""
    most, block_max = nl.ndarray((4, 1), dtype=nl.float32), nl.ndarray((4, 1), dtype=nl.float32)
    nisa.memset(most, value=0.0 if sick else float("-inf"))
    for block in range(2):
        tile = nl.load(x[:, block * 8 : block * 8 + 8])
        nisa.tensor_reduce(dst=block_max, data=tile, op=nl.maximum, axis=1)
        nisa.tensor_tensor(dst=most, data1=most, data2=block_max, op=nl.maximum)  # blamed
    return copied_out(most)


@fault("NKW-IDENTITY", ramp(4, 16) + 1, answer=lambda x: np.minimum(x[:, 0:8], x[:, 8:16]))
def minimum_from_zero(x, sick):
    """The element-wise minimum of two blocks starts at 0 and takes the tile as its second operand."""
    least = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.memset(least, value=0.0 if sick else 3e38)
    for block in range(2):
        tile = nl.load(x[:, block * 8 : block * 8 + 8])
        nisa.tensor_tensor(dst=least, data1=tile, data2=least, op=nl.minimum)  # blamed
    return copied_out(least)


@fault("NKW-IDENTITY", ramp(4, 12) + 1, answer=lambda x: x[:, 0:4] * x[:, 4:8] * x[:, 8:12])
def product_from_zero(x, sick):
    """The running product starts at 0."""
    product = nl.full((4, 4), 0.0 if sick else 1.0, dtype=nl.float32)
    for block in range(3):
        tile = nl.load(x[:, block * 4 : block * 4 + 4])
        nisa.tensor_tensor(dst=product, data1=product, data2=tile, op=nl.multiply)  # blamed
    return copied_out(product)


@fault(
    "NKW-INT-PRODUCT",
    ramp(1152, 4).astype(np.int8),
    ramp(1152, 6).astype(np.int8),
    answer=lambda a, b: (a.astype(np.int32).T @ b.astype(np.int32)).astype(np.float32),
)
def bytes_in_one_group(a, b, sick):
    """Products of int8 data over K = 1152 are summed in one group, although two of 1024 and 128 are exact."""
    total, sums = nl.full((4, 6), 0.0, dtype=nl.float32), nl.ndarray((4, 6), nl.float32, buffer=nl.psum)
    for block in range(9):
        rows = slice(128 * block, 128 * block + 128)
        stationary, moving = nl.load(a[rows], dtype=nl.bfloat16), nl.load(b[rows], dtype=nl.bfloat16)
        first = block == 0 or (block == 8 and not sick)
        nisa.nc_matmul(dst=sums, stationary=stationary, moving=moving, accumulate=not first)  # blamed
        if block == 8 or (block == 7 and not sick):
            nisa.tensor_tensor(dst=total, data1=total, data2=sums, op=nl.add)
    return copied_out(total)


@fault("NKW-SUM-ABSORBED", np.full((4, 16), 257, np.float32), answer=lambda x: x + np.float32(3))
def counts_in_bfloat16(x, sick):
    """Ones are added to a bfloat16 sum of 257, whose neighbours are 256 and 258."""
    total = nl.load(x, dtype=nl.bfloat16 if sick else nl.float32)
    one = nl.full((4, 16), 1.0, dtype=nl.float32)
    for _ in range(3):
        nisa.tensor_tensor(dst=total, data1=total, data2=one, op=nl.add)  # blamed
    wide = nl.ndarray((4, 16), dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=total)
    return copied_out(wide)


@fault("NKW-SUM-ABSORBED", ramp(8, 16) + 512, answer=lambda x: x + np.float32(0.5) * 4)
def small_steps_in_float16(x, sick):
    """A float16 state takes steps of an eighth of its spacing."""
    state = nl.ndarray((8, 16), dtype=nl.float16 if sick else nl.float32)
    nisa.dma_copy(dst=state, src=x)
    step = nl.full((8, 16), 0.0625 if sick else 0.5, dtype=nl.float32)
    for _ in range(4):
        nisa.tensor_tensor(dst=state, data1=step, data2=state, op=nl.add)  # blamed
    wide = nl.ndarray((8, 16), dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=state)
    return copied_out(wide)


@fault("NKW-SUM-ABSORBED", ramp(8, 8) + 1, answer=lambda x: x * np.float32(4096 * 16))
def partial_sums_of_a_long_loop(x, sick):
    """Partial products from PSUM are summed in bfloat16, where the sum outgrows them."""
    tile, scaled = nl.load(x), nl.ndarray((8, 8), dtype=nl.float32)
    total = nl.zeros((8, 8), dtype=nl.bfloat16 if sick else nl.float32)
    product = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
    rounds = 600 if sick else 16
    scale = 1.0 if sick else 4096.0
    nisa.activation(dst=product, op=nl.copy, data=tile, scale=scale)
    for _ in range(rounds):
        nisa.tensor_tensor(dst=total, data1=total, data2=product, op=nl.add)  # blamed
    nisa.tensor_copy(dst=scaled, src=total)
    return copied_out(scaled)


@fault("NKW-SHIFT-SIGN", ramp(4, 8, dtype=np.int32) - 9, answer=lambda x: (x + 64 >> 2) - 16)
def quarter_of_a_signed_number(x, sick):
    """A negative difference is divided by 4 by a right shift."""
    tile = nl.load(x)
    if not sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=64.0)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.right_shift, operand0=2)  # blamed
    if not sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.subtract, operand0=16.0)
    return copied_out(tile)


@fault("NKW-SHIFT-SIGN", ramp(4, 8, dtype=np.int16), answer=lambda x: x >> 1)
def middle_of_two_offsets(x, sick):
    """The middle of two int16 offsets, one of which is negative, in a loop and with a tile of shift counts."""
    tile, out = nl.load(x), nl.ndarray((4, 8), dtype=nl.int16)
    count = nl.full((4, 8), 1, dtype=nl.int16)
    if sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.subtract, operand0=20.0)
    for half in range(2):
        columns = slice(half * 4, half * 4 + 4)
        nisa.tensor_tensor(  # blamed
            dst=out[:, columns], data1=tile[:, columns], data2=count[:, columns], op=nl.right_shift
        )
    return copied_out(out)


@fault("NKW-INVERT-MASK", ramp(4, 8), answer=lambda x: np.where(x > 9, 0, x))
def mask_negated_bit_by_bit(x, sick):
    """A mask of 0 and 1 is negated with invert, so that both its values are true."""
    tile, mask = nl.load(x), nl.ndarray((4, 8), dtype=nl.uint8)
    kept = nl.zeros((4, 8), dtype=nl.float32)
    nisa.tensor_scalar(dst=mask, data=tile, op0=nl.greater, operand0=9.0)
    if sick:
        nisa.tensor_scalar(dst=mask, data=mask, op0=nl.invert, operand0=None)  # blamed
    else:
        nisa.tensor_scalar(dst=mask, data=mask, op0=nl.bitwise_xor, operand0=1)
    nisa.tensor_copy_predicated(dst=kept, src=tile, predicate=mask)
    return copied_out(kept)


@fault("NKW-INVERT-MASK", ramp(4, 8, dtype=np.int32), answer=lambda x: 1 - (x > 9).astype(np.int32))
def flags_by_exclusive_or(x, sick):
    """Flags of 0 and 1 are flipped by an exclusive or with all ones."""
    tile, flags = nl.load(x), nl.ndarray((4, 8), dtype=nl.int32)
    nisa.tensor_scalar(dst=flags, data=tile, op0=nl.greater, operand0=9.0)
    nisa.tensor_scalar(  # blamed
        dst=flags, data=flags, op0=nl.bitwise_xor, operand0=-1 if sick else 1
    )
    return copied_out(flags)


@fault(
    "NKW-INDEX-ROUNDED", ramp(16, 4), ramp(8, 1), answer=lambda x, p: x[(ramp(8, 1)[:, 0] // 4).astype(int)]
)
def page_of_a_position(x, positions, sick):
    """The page of a position is its quotient by 4, which the cast rounds to the nearest page."""
    position_tile, pages = nl.load(positions), nl.ndarray((8, 1), dtype=nl.int32)
    nisa.tensor_scalar(  # blamed
        dst=pages,
        data=position_tile,
        op0=nl.multiply,
        operand0=0.25,
        op1=nl.subtract,
        operand1=0.0 if sick else 0.375,
    )
    rows = nl.ndarray((8, 4), dtype=nl.float32)
    nisa.dma_copy(dst=rows, src=x.ap(pattern=[[4, 8], [1, 4]], vector_offset=pages, indirect_dim=0))
    return copied_out(rows)


@fault("NKW-INDEX-ROUNDED", ramp(16, 4), ramp(8, 1), answer=lambda x, p: x[(p[:, 0] // 8).astype(int)])
def block_numbers_by_way_of_a_copy(x, positions, sick):
    """Block numbers are computed on the Scalar engine, copied, and are the offsets of a load."""
    blocks, numbers = nl.ndarray((8, 1), dtype=nl.int32), nl.ndarray((8, 1), dtype=nl.uint32)
    nisa.activation(  # blamed
        dst=blocks, op=nl.copy, data=nl.load(positions), scale=0.125, bias=0.0 if sick else -0.4375
    )
    nisa.tensor_copy(dst=numbers, src=blocks)
    rows = nl.ndarray((8, 4), dtype=nl.float32)
    nisa.dma_copy(dst=rows, src=x.ap(pattern=[[4, 8], [1, 4]], vector_offset=numbers, indirect_dim=0))
    return copied_out(rows)


@fault("NKW-REINTERPRETED", ramp(4, 8), answer=lambda x: x + x)
def view_for_a_cast(x, sick):
    """A bfloat16 tile is viewed as float16 where a copy would convert it."""
    half = nl.load(x, dtype=nl.bfloat16)
    other = nl.ndarray((4, 8), dtype=nl.float16)
    nisa.tensor_copy(dst=other, src=half)
    source = half.view(nl.float16) if sick else other
    out = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_tensor(dst=out, data1=source, data2=source, op=nl.add)  # blamed
    return copied_out(out)


@fault("NKW-REINTERPRETED", ramp(4, 8), answer=lambda x: x[:, 0:4].astype(ml_dtypes.bfloat16))
def halves_as_words(x, sick):
    """A scratch tile of bfloat16 is read as float32 by the activation that scales it."""
    scratch = nl.ndarray((4, 8), dtype=nl.bfloat16)
    nisa.tensor_copy(dst=scratch, src=nl.load(x))
    out = nl.ndarray((4, 4), dtype=nl.bfloat16)
    nisa.activation(  # blamed
        dst=out, op=nl.copy, data=scratch.view(nl.float32) if sick else scratch[:, 0:4]
    )
    return copied_out(out)


@fault("NKW-SEED-REPEATED", np.full((1, 1), 7, np.uint32), answer=lambda seed: np.ones((1, 1), np.uint32) * 7)
def seeded_in_each_round(seed, sick):
    """Each round sets the seed again, so that all rounds draw the same numbers."""
    value = nl.load(seed)
    noise = nl.ndarray((4, 2, 8), dtype=nl.uint32)
    for number in range(2):
        if sick or number == 0:
            nisa.set_rng_seed(src_seeds=value)  # blamed
        nisa.rng(dst=noise[:, number])
    return copied_out(value)


@fault(
    "NKW-SEED-REPEATED",
    np.array([[7, 8]], np.uint32),
    answer=lambda seed: np.array([[7], [8]], np.uint32),
    cores=2,
)
def one_seed_for_two_cores(seed, sick):
    """Both cores take the first seed."""
    core = nl.program_id(0)
    value = nl.load(seed[:, core : core + 1])
    used = nl.load(seed[:, 0:1]) if sick else value
    nisa.set_rng_seed(src_seeds=used)  # blamed
    noise = nl.ndarray((4, 8), dtype=nl.uint32)
    nisa.rng(dst=noise)
    out = nl.ndarray((2, 1), dtype=nl.uint32, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out[core : core + 1], src=value)
    return out


def _powers(*shape):
    """Powers of two, whose float32 sums are exact."""
    return np.float32(2) ** (ramp(*shape) % 4)


@fault("NKW-SUM-NARROW", _powers(33, 4, 8), answer=lambda x: x.sum(0))
def blocks_summed_in_bfloat16(x, sick):
    """Thirty-three blocks are added to a bfloat16 tile. Healthy, the tile is float32."""
    total, out = (
        nl.zeros((4, 8), dtype=nl.bfloat16 if sick else nl.float32),
        nl.ndarray((4, 8), dtype=nl.float32),
    )
    for block in range(33):
        tile = nl.load(x[block])
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)  # blamed
    nisa.tensor_copy(dst=out, src=total)
    return copied_out(out)


@fault("NKW-SUM-NARROW", _powers(4, 320), answer=lambda x: x.reshape(4, 40, 8).sum(1))
def columns_summed_in_float16(x, sick):
    """Forty blocks of columns of one tile are added to a float16 tile that starts with the first one."""
    tile, out = nl.load(x), nl.ndarray((4, 8), dtype=nl.float32)
    total = nl.ndarray((4, 8), dtype=nl.float16 if sick else nl.float32)
    nisa.tensor_copy(dst=total, src=tile[:, 0:8])
    for block in range(1, 40):
        columns = tile[:, block * 8 : block * 8 + 8]
        nisa.tensor_tensor(dst=total, data1=columns, data2=total, op=nl.add)  # blamed
    nisa.tensor_copy(dst=out, src=total)
    return copied_out(out)


@fault("NKW-SUM-NARROW", _powers(2, 34, 4), answer=lambda x: x.sum(1))
def sums_of_two_rows_in_bfloat16(x, sick):
    """Each row of the output is a bfloat16 sum of 34 rows."""
    out = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for row in range(2):
        total = nl.zeros((1, 4), dtype=nl.bfloat16 if sick else nl.float32)
        for term in range(34):
            tile = nl.load(x[row, term : term + 1])
            nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)  # blamed
        wide = nl.ndarray((1, 4), dtype=nl.float32)
        nisa.tensor_copy(dst=wide, src=total)
        nisa.dma_copy(dst=out[row : row + 1], src=wide)
    return out

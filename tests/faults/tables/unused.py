"""Results that nothing reads: dead computations and loads, sums beside a result, and scratch memory."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import TWO_RANKS, copied_out, inner, ramp, sum_of_two
from tests.faults.table import fault


@fault("NKW-RESULT-UNUSED", ramp(8, 4), ramp(8, 4) + 1, answer=lambda x, y: x * y + x)
def product_computed_twice(x, y, sick):
    """The second product goes to a tile of its own that nothing reads, in place of the sum."""
    left, right, product = nl.load(x), nl.load(y), nl.ndarray((8, 4), dtype=nl.float32)
    nisa.tensor_tensor(dst=product, data1=left, data2=right, op=nl.multiply)
    if sick:
        total = nl.ndarray((8, 4), dtype=nl.float32)
        nisa.tensor_tensor(dst=total, data1=product, data2=left, op=nl.add)  # blamed
    else:
        nisa.tensor_tensor(dst=product, data1=product, data2=left, op=nl.add)
    return copied_out(product)


@fault("NKW-RESULT-UNUSED", ramp(8, 8), answer=lambda x: np.maximum(x * 2 - 9, 0))
def activation_of_each_block_dead(x, sick):
    """In each round the activation writes a new tile, and the tile before it is stored."""
    out = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for block in range(2):
        columns = slice(block * 4, block * 4 + 4)
        scaled, positive = nl.ndarray((8, 4), dtype=nl.float32), nl.ndarray((8, 4), dtype=nl.float32)
        nisa.tensor_scalar(
            dst=scaled,
            data=nl.load(x[:, columns]),
            op0=nl.multiply,
            operand0=2.0,
            op1=nl.subtract,
            operand1=9.0,
        )
        nisa.activation(dst=positive, op=nl.relu, data=scaled)  # blamed
        if sick:
            nisa.tensor_scalar(dst=scaled, data=scaled, op0=nl.maximum, operand0=-3.0)
        nisa.dma_copy(dst=out[:, columns], src=scaled if sick else positive)
    return out


@fault("NKW-RESULT-UNUSED", ramp(4, 8), answer=lambda x: x - x.max(1, keepdims=True))
def maximum_forgotten(x, sick):
    """The row maximum is computed and the constant 0 is subtracted."""
    tile, most = nl.load(x), nl.ndarray((4, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=most, data=tile, op=nl.maximum, axis=1)  # blamed
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.subtract, operand0=0.0 if sick else most)
    return copied_out(tile)


@fault("NKW-RESULT-UNUSED", ramp(16, 4), answer=lambda x: x[0:8] + x[8:16])
def second_half_loaded_and_not_used(x, sick):
    """Both halves are loaded and the first one is added to itself."""
    first = nl.load(x[0:8])
    second = nl.ndarray((8, 4), dtype=nl.float32)
    nisa.dma_copy(dst=second, src=x[8:16])  # blamed
    nisa.tensor_tensor(dst=first, data1=first, data2=first if sick else second, op=nl.add)
    return copied_out(first)


@fault("NKW-RESULT-UNUSED", ramp(8, 8), answer=lambda x: x.T + x)
def transposed_load_not_used(x, sick):
    """A strided load brings the transpose, and the sum takes the plain tile twice."""
    tile, turned = nl.load(x), nl.ndarray((8, 8), dtype=nl.float32)
    nisa.dma_copy(dst=turned, src=x.permute((1, 0)))  # blamed
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile if sick else turned, op=nl.add)
    return copied_out(tile)


@fault("NKW-RESULT-UNUSED", ramp(3, 4, 4), answer=lambda x: x + x[:, ::-1])
def neighbours_loaded_in_a_loop(x, sick):
    """Each round loads the rows in reverse order, one at a time, and adds the block to itself."""
    out = nl.ndarray((3, 4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for block in range(3):
        tile, other = nl.load(x[block]), nl.ndarray((4, 4), dtype=nl.float32)
        for row in range(4):
            nisa.dma_copy(dst=other[row : row + 1], src=x[block, 3 - row : 4 - row])  # blamed
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile if sick else other, op=nl.add)
        nisa.dma_copy(dst=out[block], src=tile)
    return out


@fault("NKW-RESULT-UNUSED", ramp(4, 8), answer=lambda x: x * x + (x * x).sum(1, keepdims=True))
def sums_of_squares_not_read(x, sick):
    """The sums beside the squares are asked for, and the first square is added in their place."""
    squares, sums = nl.ndarray((4, 8), dtype=nl.float32), nl.ndarray((4, 1), dtype=nl.float32)
    nisa.activation_reduce(  # blamed
        dst=squares, op=nl.square, data=nl.load(x), reduce_op=nl.add, reduce_res=sums
    )
    added = squares[:, 0:1] if sick else sums
    out = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_scalar(dst=out, data=squares, op0=nl.add, operand0=added)
    return copied_out(out)


@fault("NKW-RESULT-UNUSED", ramp(4, 8), answer=lambda x: (x + 2) * (x + 2).max(1, keepdims=True))
def maxima_beside_the_sum_not_read(x, sick):
    """The Vector engine accumulates the maxima of a shifted tile, and its last column is taken for them."""
    tile, most = nl.ndarray((4, 8), dtype=nl.float32), nl.ndarray((4, 1), dtype=nl.float32)
    nisa.tensor_scalar_reduce(  # blamed
        dst=tile, data=nl.load(x), op0=nl.add, operand0=2.0, reduce_op=nl.maximum, reduce_res=most
    )
    out = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_scalar(dst=out, data=tile, op0=nl.multiply, operand0=tile[:, 7:8] if sick else most)
    return copied_out(out)


@fault("NKW-RESULT-UNUSED", ramp(2, 4, 8), answer=lambda x: x / 2 - (x / 2).sum(2, keepdims=True))
def sums_of_each_head_not_read(x, sick):
    """In a loop over heads the sums go to a column for each head, and a column of zeros is subtracted."""
    out = nl.ndarray((2, 4, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    sums, zeros = nl.ndarray((4, 2), dtype=nl.float32), nl.zeros((4, 2), dtype=nl.float32)
    for head in range(2):
        half, column = nl.ndarray((4, 8), dtype=nl.float32), slice(head, head + 1)
        nisa.activation_reduce(  # blamed
            dst=half,
            op=nl.copy,
            data=nl.load(x[head]),
            scale=0.5,
            reduce_op=nl.add,
            reduce_res=sums[:, column],
        )
        taken = zeros if sick else sums
        nisa.tensor_scalar(dst=half, data=half, op0=nl.subtract, operand0=taken[:, column])
        nisa.dma_copy(dst=out[head], src=half)
    return out


@fault("NKW-RESULT-UNUSED", ramp(8, 4), answer=lambda x: (x + 1)[::-1])
def scratch_never_read(x, sick):
    """Rows are stored to scratch memory in reverse order, and the output is stored from the tile."""
    tile, scratch = nl.load(x), nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    for row in range(8):
        nisa.dma_copy(dst=scratch[7 - row : 8 - row], src=tile[row : row + 1])  # blamed
    if not sick:
        nisa.dma_copy(dst=tile, src=scratch)
    return copied_out(tile)


@fault("NKW-RESULT-UNUSED", ranks=TWO_RANKS, answer=sum_of_two)
def operand_of_a_collective_written_too_late(x, rank, sick):
    """The operand of an all_reduce is written again after it. Healthy, it is written before."""
    source = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.private_hbm, name="source")
    total = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.private_hbm, name="total")
    nisa.dma_copy(dst=source, src=nl.zeros((4, 4), dtype=nl.float32) if sick else x)
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=ncc.ReplicaGroup([[0, 1]]), op=nl.add)
    if sick:
        nisa.dma_copy(dst=source, src=x)  # blamed
    return copied_out(nl.load(total))


@fault(
    "NKW-RESULT-UNUSED",
    ranks=TWO_RANKS,
    answer=lambda rank_inputs: [2 * total for total in sum_of_two(rank_inputs)],
)
def prepared_operand_of_a_collective_unread(x, rank, sick):
    """The operand is doubled into scratch memory of its own, and the collective takes the operand itself."""
    source, total = inner(x), nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.private_hbm, name="total")
    prepared = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.private_hbm, name="prepared")
    tile = nl.load(source)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
    nisa.dma_copy(dst=prepared, src=tile)  # blamed
    operand = source if sick else prepared
    ncc.all_reduce(srcs=[operand], dsts=[total], replica_group=ncc.ReplicaGroup([[0, 1]]), op=nl.add)
    return copied_out(nl.load(total))

"""Steps of a fused mixture before its experts: RMSNorm of the token, router scores, choice of the best eight experts.

A token of H elements is an SBUF tile [128, H / 128].
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, constant, evacuate, load, psum, sbuf

_QUADRANTS = 4
_EPSILON = 1.0e-6


def normalised(x, gamma):
    """Return the RMSNorm of a token x [1, H] in HBM with gains [1, H], as an SBUF tile [128, H / 128] of x's dtype."""
    columns, gains = _turned(x), _turned(gamma)
    squares, sums = sbuf(columns.shape, nl.float32), sbuf((PARTITIONS, 1), nl.float32)
    nisa.activation(dst=squares, op=nl.square, data=columns)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=squares, axis=1)
    scaled = sbuf(columns.shape, nl.float32)
    nisa.tensor_tensor(dst=scaled, data1=columns, data2=gains, op=nl.multiply)
    total = sbuf((1, 1), nl.float32)
    nisa.tensor_partition_reduce(dst=total, data=sums, op=nl.add)
    factor = sbuf((PARTITIONS, 1), nl.float32)
    nisa.activation(
        dst=factor,
        op=nl.rsqrt,
        data=_spread(total),
        scale=1.0 / x.shape[1],
        bias=constant((PARTITIONS, 1), _EPSILON),
    )
    normed = sbuf(columns.shape, nl.float32)
    nisa.tensor_scalar(dst=normed, data=scaled, op0=nl.multiply, operand0=factor)
    return evacuate(normed, x.dtype)


def routed(token, router, loads, prepared):
    """Return the routing weights of the best eight experts, which add up to 1, and their ids.

    router [H, E] in HBM comes in `loads` DMAs. Their descriptors are prepared when the kernel is loaded if `prepared`,
    else software writes them.

    Returns:
        The weights on every partition, float32 [128, 8]; the ids, uint32 [1, 8]. Both are in SBUF.
    """
    depth, count = router.shape
    blocks = depth // PARTITIONS
    blocks_per_load = blocks // loads
    bank = psum((1, count))
    for first in range(0, blocks, blocks_per_load):
        tile = sbuf((PARTITIONS, blocks_per_load, count), router.dtype)
        pattern = [[count, PARTITIONS], [PARTITIONS * count, blocks_per_load], [1, count]]
        source = router.ap(pattern=pattern, offset=first * PARTITIONS * count)
        nisa.dma_copy(dst=tile, src=source, dge_mode=nisa.dge_mode.none if prepared else nisa.dge_mode.swdge)
        for k in range(blocks_per_load):
            column = token[:, first + k : first + k + 1]
            nisa.nc_matmul(dst=bank, stationary=column, moving=tile[:, k, :], accumulate=first + k > 0)
    logits = evacuate(bank, nl.float32)
    largest = sbuf((1, 1), nl.float32)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=logits, axis=1)
    nisa.tensor_scalar(dst=logits, data=logits, op0=nl.subtract, operand0=largest)
    nisa.activation(dst=logits, op=nl.exp, data=logits)
    _to_sum_one(logits)
    values, indices = sbuf((1, 8), nl.float32), sbuf((1, 8), nl.uint32)
    nisa.max8(dst=values, src=logits)
    nisa.nc_find_index8(dst=indices, data=logits, vals=values)
    _to_sum_one(values)
    return _spread(values), indices


def quantised(columns, by_shuffles):
    """Return the columns times 240 / their largest element, for fp8, as a new bfloat16 SBUF tile.

    That element is the maximum over all partitions, found by shuffles if `by_shuffles`, else by GpSimd.
    """
    largest, one = sbuf((PARTITIONS, 1), nl.float32), sbuf((1, 1), nl.float32)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=columns, axis=1)
    if by_shuffles:
        one = _largest_by_shuffles(largest)
    else:
        nisa.tensor_partition_reduce(dst=one, data=largest, op=nl.maximum)
    wide = _spread(one)
    nisa.tensor_scalar(
        dst=wide, data=wide, op0=nl.multiply, operand0=1.0 / 240.0, op1=nl.maximum, operand1=_EPSILON
    )
    nisa.reciprocal(dst=wide, data=wide)
    narrow = sbuf(columns.shape, nl.float32)
    nisa.tensor_scalar(dst=narrow, data=columns, op0=nl.multiply, operand0=wide)
    return evacuate(narrow, nl.bfloat16)


def _turned(row):
    """Load a row [1, H] of HBM in blocks and transpose them on the Tensor engine to an SBUF tile [128, H / 128]."""
    blocks = row.shape[1] // PARTITIONS
    flat = load(row.reshape((blocks, PARTITIONS)))
    bank = psum((PARTITIONS, blocks), row.dtype)
    nisa.nc_transpose(dst=bank, data=flat)
    return evacuate(bank, row.dtype)


def _spread(row):
    """Broadcast a row [1, n] to every partition of a new float32 SBUF tile [128, n].

    The row is copied to partition 0 and shuffled to the others.
    """
    wide = sbuf((PARTITIONS, row.shape[1]), nl.float32)
    nisa.tensor_copy(dst=wide[0:1, :], src=row)
    for quadrant in range(_QUADRANTS):
        size = PARTITIONS // _QUADRANTS
        target = wide[quadrant * size : (quadrant + 1) * size, :]
        nisa.nc_stream_shuffle(dst=target, src=wide[0:1, :], shuffle_mask=[0] * size)
    return wide


def _to_sum_one(row):
    """Divide an SBUF row [1, n] by its sum, in place."""
    total = sbuf((1, 1), nl.float32)
    nisa.tensor_reduce(dst=total, op=nl.add, data=row, axis=1)
    nisa.activation(dst=total, op=nl.reciprocal, data=total)
    nisa.tensor_scalar(dst=row, data=row, op0=nl.multiply, operand0=total)


def _largest_by_shuffles(column):
    """Return the maximum of a column [128, 1] as a tile [1, 1].

    It takes five shuffles in each quadrant of 32 partitions, then maxima over the quadrants.
    """
    size = PARTITIONS // _QUADRANTS
    largest = None
    for quadrant in range(_QUADRANTS):
        quadrant_column = sbuf((size, 1), nl.float32)
        nisa.tensor_copy(dst=quadrant_column, src=column[quadrant * size : (quadrant + 1) * size, :])
        step = 1
        while step < size:
            moved = sbuf((size, 1), nl.float32)
            nisa.nc_stream_shuffle(
                dst=moved, src=quadrant_column, shuffle_mask=[(i + step) % size for i in range(size)]
            )
            nisa.tensor_tensor(dst=quadrant_column, data1=quadrant_column, data2=moved, op=nl.maximum)
            step *= 2
        if largest is not None:
            nisa.tensor_tensor(dst=quadrant_column, data1=quadrant_column, data2=largest, op=nl.maximum)
        largest = quadrant_column
    return largest[0:1, :]

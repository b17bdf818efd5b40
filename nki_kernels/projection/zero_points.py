"""The term of a product that comes from zero points: - zero[n] * sum over k of x[k, t], for weights of 4 bits.

The products multiply the nibbles alone. The term is one more block of their contraction, with a row for each of three
parts of the sums: the sum of a row of x in float32 is split into three numbers of 16 bits, which add up to it. The
rows lie on the first partition of three quadrants, where engines can begin. All others are zeros.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.nibbles import SYMMETRIC_ZERO, UNIT
from nki_kernels.tiles import PARTITIONS, blocks, count_block_partitions, filled

QUADRANT = PARTITIONS // 4
ROWS = 2 * QUADRANT + 1
"""Partitions of the block: the three parts are on 0, 32 and 64."""


def fill_minus_ones(dtype):
    """Return a new SBUF tile [128, 128] of -1, with which `negate_sums` multiplies rows of `dtype`."""
    return filled((PARTITIONS, PARTITIONS), -1.0, dtype)


def negate_sums(x, depth, minus_ones):
    """Return the block of minus the sums of the rows of `x`, [ROWS, row] in SBUF in x's dtype.

    x: SBUF tile [k in block, block, row] with `depth` elements of each row. It is float32 or has 16 bits; float32 needs
    one part. minus_ones: result of `fill_minus_ones`.
    """
    rows = x.shape[2]
    bank = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.psum)
    for block in range(blocks(depth)):
        used = count_block_partitions(depth, block, False)
        nisa.nc_matmul(
            dst=bank, stationary=minus_ones[0:used, :], moving=x[0:used, block, :], accumulate=block > 0
        )
    sums = nl.ndarray((ROWS, rows), dtype=x.dtype, buffer=nl.sbuf)
    nisa.memset(dst=sums, value=0.0, engine=nisa.engine.vector)
    remaining = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=remaining, src=bank)
    for first in range(0, ROWS, QUADRANT):
        # Every partition has the sums, so each part is taken where its row lies.
        nisa.tensor_copy(dst=sums[first : first + 1, :], src=remaining[first : first + 1, :])
        if x.dtype == nl.float32:
            break
        if first + QUADRANT < ROWS:
            rounded = nl.ndarray((PARTITIONS, rows), dtype=x.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=remaining)
            below = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=below, data1=remaining, data2=rounded, op=nl.subtract)
            remaining = below
    return sums


def load_zero_points(weights, dtype):
    """Return the zero points of weights of 4 bits in the block of `negate_sums`: [ROWS, weight, column] in SBUF.

    weights: list of WeightMatrix of equal width. dtype: of the tile, in which products take the weights' nibbles.
    """
    columns = weights[0].elements.shape[1]
    shape = (ROWS, len(weights), columns)
    if weights[0].nibbles.zeros is None:
        column = filled((ROWS, 1, 1), SYMMETRIC_ZERO * UNIT, dtype)
        return column.broadcast(1, len(weights)).broadcast(2, columns)
    raw = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
    words = raw.view(nl.uint32) if columns % 4 == 0 else raw
    nisa.memset(dst=words, value=0, engine=nisa.engine.vector)
    for first in range(0, ROWS, QUADRANT):
        for side in range(len(weights)):
            transfer(raw[first : first + 1, side, :], weights[side].nibbles.zeros, SCALAR)
    if dtype == nl.float8_e4m3:
        return raw.view(dtype)
    zero_points = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=zero_points, op=nl.copy, data=raw, scale=UNIT)
    return zero_points

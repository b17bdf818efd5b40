"""Products of rows and weights of 8-bit integers (W8A8), equal to their definition bit for bit.

The Tensor engine multiplies no integers, but bfloat16 holds those of 8 bits, and PSUM sums their products in float32.
Such a sum is exact, in any order, while the magnitudes of its products add up to at most 2^24: for int8 times int8 up
to 1024 products, 1024 * 128^2. So the definition of the product is: exact sums over groups of at most 1024 products,
added in float32 in the order of K. `nkw check` proves from the dtypes that the sums of the groups are exact.

Rows of activations become integers by a scale of their own: scale = max(|row|) / 127, and integer = row * (1 / scale),
rounded to nearest, ties to even.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.dma import STATIC
from nki_kernels.projection.quantised_rows import LEAST, compute_scale
from nki_kernels.projection.row_maxima import PIECE_COLUMNS, find_largest_in_rows
from nki_kernels.tiles import PARTITIONS, blocks, count_block_partitions, ranges
from nki_kernels.weights import load_blocks

GROUP_BLOCKS = 8
"""Blocks of 128 products of a group."""

LARGEST_INTEGER = 127.0


def sum_integer_products(stationary, weight):
    """Return the product of rows and a weight of integers, float32 [row, column], in PSUM or SBUF.

    The sums of one group stay in PSUM, those of several groups are added in SBUF. The weight is loaded group by group,
    so that SBUF has 1024 of its rows at a time.

    Args:
        stationary: bfloat16 SBUF tile [k in block, block, row] of integers from -128 to 127, at most 128 rows.
            Element k of the contraction lies on partition k % 128, in block k // 128.
        weight: WeightMatrix [K, N] of int8 elements, at most 512 columns. Its scales are left to the caller.
    """
    depth, columns = weight.elements.shape
    shape = (stationary.shape[2], columns)
    totals = None
    for first, end in ranges(0, depth, GROUP_BLOCKS * PARTITIONS):
        moving = load_blocks(weight.submatrix((first, end), (0, columns)), nl.bfloat16, STATIC)
        group = sum_group(stationary[:, first // PARTITIONS : blocks(end), :], moving, end - first)
        if end - first == depth:
            return group
        if totals is None:
            totals = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=totals, op=nl.copy, data=group)
        else:
            nisa.tensor_tensor(dst=totals, data1=totals, data2=group, op=nl.add)
    return totals


def sum_group(stationary, moving, depth):
    """Return the exact sums of a group of `depth` products, a new float32 tile [row, column] in PSUM.

    stationary, moving: bfloat16 SBUF tiles of integers, [k in block, block, row] and [k in block, block, column].
    """
    group = nl.ndarray((stationary.shape[2], moving.shape[2]), dtype=nl.float32, buffer=nl.psum)
    for block in range(blocks(depth)):
        used = count_block_partitions(depth, block, False)
        nisa.nc_matmul(
            dst=group,
            stationary=stationary[0:used, block, :],
            moving=moving[0:used, block, :],
            accumulate=block > 0,
        )
    return group


def quantise_rows_to_integers(rows, static=None, largest=None):
    """Return integers of 8 bits as a new bfloat16 tile of the shape of `rows`, and float32 scales [row, 1].

    rows: float32 or bfloat16 SBUF tile [row, n], finite. static: StaticScale of all rows, which are then clipped in
    place. Without it each row has a scale of its own, and integers from -127 to 127. largest: the largest magnitude of
    each row, [row, 1] in SBUF; None for those of `rows`. The integers pass through int8, which rounds them. Pieces of
    the columns keep magnitudes and int8 elements small.
    """
    if static is None:
        largest = find_largest_in_rows(rows) if largest is None else largest
        scales, inverses = compute_scale(largest, LARGEST_INTEGER)
    else:
        static.clip(rows)
        scales, inverses = static.scale[0 : rows.shape[0], :], static.inverse[0 : rows.shape[0], :]
    numbers = nl.ndarray(rows.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    for first, end in ranges(0, rows.shape[1], PIECE_COLUMNS):
        integers = nl.ndarray((rows.shape[0], end - first), dtype=nl.int8, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=integers, data=rows[:, first:end], op0=nl.multiply, operand0=inverses)
        nisa.tensor_copy(dst=numbers[:, first:end], src=integers)
    return numbers, scales


def integer_product_reference(rows, weight):
    """Return rows [T, K] times weight [K, N], both int8, as float32 [T, N]: the definition of the product.

    The groups are of 1024 consecutive k. Their sums are exact, and added in float32 in the order of k.
    """
    total = np.zeros((rows.shape[0], weight.shape[1]), np.float32)
    size = 1024
    for first in range(0, rows.shape[1], size):
        group = rows[:, first : first + size].astype(np.int64) @ weight[first : first + size].astype(np.int64)
        total = total + group.astype(np.float32)
    return total


def integer_rows_reference(rows, input_scale=None):
    """Return int8 integers and float32 scales [row, 1] of rows [row, n]; every operation rounds to float32.

    With a static input_scale [1, 1] it is the scale of every row, and rows are clipped to -128 … 127 times the scale,
    rounded to their own dtype.
    """
    wide = rows.astype(np.float32)
    if input_scale is not None:
        scales = np.broadcast_to(input_scale.astype(np.float32), (len(rows), 1))
        clipped = np.clip(wide, -128 * scales, 127 * scales).astype(rows.dtype).astype(np.float32)
        return np.clip(np.rint(clipped * (np.float32(1) / scales)), -128, 127).astype(np.int8), scales
    largest = np.maximum(np.abs(wide).max(axis=1, keepdims=True), np.float32(LEAST))
    scales = largest * np.float32(1 / LARGEST_INTEGER)
    return np.rint(wide * (np.float32(1) / scales)).astype(np.int8), scales


def quantised_product_reference(rows, weight, column_scales, input_scale=None):
    """Return rows [T, K], as integers with a scale for each row, times an int8 weight [K, N] and scales of its columns.

    The result is float32 [T, N]; the sums are multiplied by the scales of the rows first. column_scales: [1, N].
    input_scale: static scale of all rows, [1, 1], or None.
    """
    numbers, row_scales = integer_rows_reference(rows, input_scale)
    return integer_product_reference(numbers, weight) * row_scales * column_scales.astype(np.float32)

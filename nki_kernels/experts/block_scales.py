"""Products with weights of 8 bits that have a scale for each block of 128 rows and 128 columns.

    sums[n, r] = sum over K blocks b of scales[b, n // 128] * (sum over k in block b of x[r, k] * elements[k, n])

A matmul contracts one K block, so its sums share one scale for each block of columns. There are three ways:

    rows            a pair of blocks takes                  rounded beside float32
    up to 8         2 elements for each row: its sums are   nothing
                    multiplied by their scale as they
                    leave PSUM, and added
    9 to 128        1 element for each row: a copy of the   each copy to the rows' dtype
                    rows is multiplied by the scale before
                    the product, which PSUM adds
    prompts         128 elements: the weight is multiplied  each widened element to the rows' dtype
                    by the scale as it is loaded

`nki_kernels.block_scales` has the steps of the second and the third way, and the times of an element and of a pair of
blocks. Scales are in SBUF as [partition, K block, column block], the same on every partition.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.block_scales import choose_engine, multiply_blocks
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges
from nki_kernels.weights import convert, is_plain, view_expert

MOST_SCALED_SUMS = 8
"""Most rows whose sums are multiplied by scales."""

GPSIMD_SHARE = 3
"""GpSimd makes one of so many copies of rows, the Vector engine the others."""


def load_block_scales(stack, expert):
    """Load an expert's block scales onto all partitions, float32 [128, K block, column block] in SBUF; None for none.

    stack: `WeightMatrix` [E, K, N]. expert: `ExpertIndex`.
    """
    scales = stack.block_scales
    if scales is None:
        return None
    _, depth, columns = scales.shape
    tile = nl.ndarray((PARTITIONS, depth, columns), dtype=nl.float32, buffer=nl.sbuf)
    # The DMA reads the same numbers for each partition: 3 % of the bytes of the weight.
    source = view_expert(scales, expert, [[0, PARTITIONS], [1, depth * columns]], 0)
    transfer(tile.reshape((PARTITIONS, depth * columns)), source, SCALAR)
    return tile


def load_expert_blocks(stack, expert, block_range, columns, dtype, scales, index):
    """Load K blocks of some columns of an expert's weight as a new SBUF tile [k in block, block, column] of `dtype`.

    Args:
        stack: `WeightMatrix` [E, K, N].
        expert: `ExpertIndex`.
        block_range, columns: ranges (first, end) of K blocks and columns; columns begin with a block.
        dtype: of the tile.
        scales: of the whole weight in SBUF, by which the elements are multiplied; None to leave the elements.
        index: number of the tile among those that are widened; GpSimd widens odd ones, the Vector engine others.
    """
    elements = stack.elements
    depth, pitch = elements.shape[1], elements.shape[2]
    first_block, end_block = block_range
    first_column, end_column = columns
    width = end_column - first_column
    full = min(end_block, depth // PARTITIONS) - first_block
    shape = (min(PARTITIONS, depth), end_block - first_block, width)
    raw = nl.ndarray(shape, dtype=elements.dtype, buffer=nl.sbuf)
    offset = first_block * PARTITIONS * pitch + first_column
    if full > 0:
        pattern = [[pitch, PARTITIONS], [PARTITIONS * pitch, full], [1, width]]
        nisa.dma_copy(dst=raw[:, 0:full, :], src=view_expert(elements, expert, pattern, offset))
    short_height = depth - (first_block + full) * PARTITIONS
    if full < end_block - first_block:
        pattern = [[pitch, short_height], [1, width]]
        source = view_expert(elements, expert, pattern, offset + full * PARTITIONS * pitch)
        nisa.dma_copy(dst=raw[0:short_height, full, :], src=source)
    if scales is None and is_plain(stack, dtype):
        return raw
    converted = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    for first, end, height in ((0, full, raw.shape[0]), (full, end_block - first_block, short_height)):
        if end > first:
            target, loaded = converted[0:height, first:end, :], raw[0:height, first:end, :]
            if scales is None:
                convert(target, loaded, stack)
            else:
                k_blocks = slice(first_block + first, first_block + end)
                column_blocks = slice(first_column // PARTITIONS, blocks(end_column))
                engine = choose_engine(index, 2)
                multiply_blocks(target, loaded, scales[:, k_blocks, column_blocks], 0, engine)
    return converted


def accumulate_scaled_rows(bank, copies, tile, k_heights, first_column, accumulate):
    """Add the product of scaled rows and some K blocks of a weight to a PSUM bank.

    Args:
        bank: float32 [n in block, column block, row].
        copies: result of `copy_scaled_rows`.
        tile: elements [k in block, K block, column] in SBUF.
        k_heights: number of partitions of each K block.
        first_column: column of the tile that is column 0 of the bank.
        accumulate: whether the bank has sums already; else they are overwritten.
    """
    height = bank.shape[0]
    for k in range(len(k_heights)):  # k: K block
        for n in range(bank.shape[1]):  # n: block of columns
            start = first_column + n * PARTITIONS
            nisa.nc_matmul(
                dst=bank[:, n, :],
                stationary=tile[0 : k_heights[k], k, start : start + height],
                moving=copies[0 : k_heights[k], k, n, :],
                accumulate=accumulate or k > 0,
            )


def add_block_products(sums, x, tile, k_heights, scales, begun):
    """Add the product of rows and some K blocks of a weight, times scales, to `sums` in SBUF.

    Args:
        sums: float32 [n in block, column block, row]. All its partitions have a column in each of its blocks.
        x: SBUF tile [k in block, K block, row] with the K blocks of `tile`.
        tile: elements [k in block, K block, column] in SBUF; the columns are those of `sums`.
        k_heights: number of partitions of each K block.
        scales: float32 [128, K block, column block] in SBUF, of the blocks of `tile`.
        begun: whether `sums` has sums already; else they are overwritten.
    """
    height, columns, rows = sums.shape
    for k_first, k_end in ranges(0, len(k_heights), max(1, BANK // rows)):
        depth = k_end - k_first
        for first, end in ranges(0, columns, max(1, BANK // (depth * rows))):
            shape = (height, end - first, depth, rows)
            bank = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
            for n in range(first, end):  # n: block of columns
                for k in range(k_first, k_end):  # k: K block
                    used = k_heights[k]
                    nisa.nc_matmul(
                        dst=bank[:, n - first, k - k_first, :],
                        stationary=tile[0:used, k, n * PARTITIONS : n * PARTITIONS + height],
                        moving=x[0:used, k, :],
                        accumulate=False,
                    )
            scaled = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            factor = scales[0:height, k_first:k_end, first:end].permute((0, 2, 1))
            factor = factor.expand_dim(3).broadcast(3, rows)
            nisa.tensor_tensor(dst=scaled, data1=bank, data2=factor, op=nl.multiply)
            target = sums[:, first:end, :]
            summed = scaled[:, :, 0, :]
            if depth > 1:
                summed = target
                if begun or k_first > 0:
                    summed = nl.ndarray((height, end - first, rows), dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_reduce(dst=summed, op=nl.add, data=scaled.permute((0, 1, 3, 2)), axis=3)
            if begun or k_first > 0:
                nisa.tensor_tensor(dst=target, data1=target, data2=summed, op=nl.add)
            elif depth == 1:
                nisa.tensor_copy(dst=target, src=summed)

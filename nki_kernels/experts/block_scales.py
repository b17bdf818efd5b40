"""Products with weights of 8 bits that have a scale for each block of 128 rows and 128 columns.

    sums[n, r] = sum over K blocks b of scales[b, n // 128] * (sum over k in block b of x[r, k] * elements[k, n])

A matmul contracts one K block, so its sums share one scale for each block of columns. For few rows each matmul writes
sums of its own to PSUM. The Vector engine multiplies the sums of many blocks by their scales in one instruction, and
another one adds them over the K blocks. That takes two elements for each row and pair of blocks, where widening takes
128: it is exact up to float32. More rows take widened weights: elements times scales, rounded to the rows' dtype.

Scales are in SBUF as [partition, K block, column block], the same on every partition.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges
from nki_kernels.weights import convert, is_plain, view_expert

MOST_SCALED_ROWS = 64
"""Most rows whose sums are multiplied by scales; from there on widening takes fewer elements of the Vector engine."""


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


def load_expert_blocks(stack, expert, block_range, columns, dtype, scales):
    """Load K blocks of some columns of an expert's weight as a new SBUF tile [k in block, block, column] of `dtype`.

    Args:
        stack: `WeightMatrix` [E, K, N].
        expert: `ExpertIndex`.
        block_range, columns: ranges (first, end) of K blocks and columns; columns begin with a block.
        dtype: of the tile.
        scales: of the whole weight in SBUF, by which the elements are multiplied; None to leave the elements.
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
    height = depth - (first_block + full) * PARTITIONS
    short = full < end_block - first_block
    if short:
        pattern = [[pitch, height], [1, width]]
        source = view_expert(elements, expert, pattern, offset + full * PARTITIONS * pitch)
        nisa.dma_copy(dst=raw[0:height, full, :], src=source)
    if scales is None and is_plain(stack, dtype):
        return raw
    converted = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    column_blocks = (first_column // PARTITIONS, blocks(end_column))
    if full > 0:
        last = first_block + full
        widen(converted[:, 0:full, :], raw[:, 0:full, :], stack, scales, (first_block, last), column_blocks)
    if short:
        rows = slice(full, full + 1)
        last = (first_block + full, end_block)
        widen(converted[0:height, rows, :], raw[0:height, rows, :], stack, scales, last, column_blocks)
    return converted


def widen(dst, raw, stack, scales, k_blocks, column_blocks):
    """Write loaded elements times their scales to `dst`, both SBUF tiles [k in block, K block, column].

    Args:
        stack: the `WeightMatrix` of the elements.
        scales: of the whole weight in SBUF, or None to convert the elements alone.
        k_blocks, column_blocks: ranges (first, end) of the weight's blocks that the tiles have.
    """
    if scales is None:
        convert(dst, raw, stack)
        return
    height, width = raw.shape[0], raw.shape[2]
    first, end = k_blocks
    factors = scales[0:height, first:end, column_blocks[0] : column_blocks[1]]
    full = width // PARTITIONS
    if full > 0:
        used = full * PARTITIONS
        factor = factors[:, :, 0:full].expand_dim(3).broadcast(3, PARTITIONS)
        elements = raw[:, :, 0:used].reshape_dim(2, (full, PARTITIONS))
        target = dst[:, :, 0:used].reshape_dim(2, (full, PARTITIONS))
        nisa.tensor_tensor(dst=target, data1=elements, data2=factor, op=nl.multiply)
    if full * PARTITIONS < width:
        factor = factors[:, :, full : full + 1].broadcast(2, width - full * PARTITIONS)
        columns = slice(full * PARTITIONS, width)
        nisa.tensor_tensor(dst=dst[:, :, columns], data1=raw[:, :, columns], data2=factor, op=nl.multiply)


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

"""Products of blocks in SBUF, arranged so that neither loads nor results keep the Tensor engine waiting.

Both operands of a product lie in K blocks, [k in block, block, column]: element k of the contraction lies on
partition k % 128, in block k // 128. They are loaded in *parts* of some blocks each. While the first parts
arrive, several row tiles accumulate together, block by block, so that a loaded block gives more work than its
load takes. Once the moving operand is in SBUF, row tiles take all its blocks one after the other. The sums of
a row tile are read out of PSUM while the next row tile accumulates. `matmul` and `normed` have these loops.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import STATIC
from nki_kernels.tiles import PARTITIONS, allocate_aligned_tile, blocks, count_block_partitions
from nki_kernels.weights import convert_blocks, is_plain, load_blocks_into

PART_ELEMENTS = 4096
"""Most elements per partition that one DMA loads: 1 MiB in bfloat16, which moves at the full rate."""


def plan_growing_ranges(count, columns, first, most=PART_ELEMENTS):
    """Return ranges (start, end) of blocks that cover blocks 0 … count - 1; one DMA is meant to load each range.

    The first range has `first` blocks, and each later one up to twice as many as the one before. No range has
    more than half of the blocks that remain, rounded up. From the second range on, none has more than `most`
    elements per partition, unless one block alone has more.

    columns: the columns of a block, each of which takes one element per partition.
    """
    ranges = []
    start = 0
    size = first
    while start < count:
        # A range has at most half of what remains, so that few products are left when the last part has arrived.
        end = start + min(size, (count - start + 1) // 2)
        ranges.append((start, end))
        start = end
        size = max(1, min(most // columns, 2 * size))
    return ranges


def plan_weight_ranges(weight, columns, first, most=PART_ELEMENTS):
    """Return the `plan_growing_ranges` of the K blocks of `columns` columns of a WeightMatrix.

    Ranges of a weight of 4 bits begin at even blocks, as a run has two. They have up to twice as many blocks: elements
    take few bytes, and few instructions unpack them.
    """
    count = blocks(weight.count_rows())
    if weight.nibbles is None:
        return plan_growing_ranges(count, columns, first, most)
    ranges = []
    for start, end in plan_growing_ranges(blocks(count, 2), columns, blocks(first, 2), most):
        ranges.append((2 * start, min(count, 2 * end)))
    return ranges


def allocate_blocks(depth, count, columns, dtype):
    """Allocate an SBUF tile [k in block, block, column] for `count` blocks of a matrix [depth, columns].

    It is not initialised. A DMA may transpose into it, see `allocate_aligned_tile`.
    """
    return allocate_aligned_tile((min(depth, PARTITIONS), count, columns), dtype)


def load_block_range(tile, weight, start):
    """Load blocks `start` … of a WeightMatrix [K, n] @ HBM into all blocks of an SBUF tile [k in block, block, column].

    Elements are converted to the tile's dtype and multiplied by block scales, if there are any. If the last block of K
    is short, the partitions of the tile beyond K are not written. `start` is even for weights of 4 bits.
    """
    matrix, depth = weight.elements, weight.count_rows()
    end = start + tile.shape[1]
    if weight.nibbles is not None:
        rows = (start * PARTITIONS, min(depth, end * PARTITIONS))
        load_blocks_into(tile, weight.submatrix(rows, (0, matrix.shape[1])), STATIC)
        return
    raw = tile
    if not is_plain(weight, tile.dtype):
        raw = nl.ndarray(tile.shape, dtype=matrix.dtype, buffer=nl.sbuf)
    full = min(end, depth // PARTITIONS)
    if full > start:
        rows = matrix[start * PARTITIONS : full * PARTITIONS, :]
        source = rows.reshape_dim(0, (full - start, PARTITIONS)).permute((1, 0, 2))
        nisa.dma_copy(dst=raw[:, 0 : full - start, :], src=source)
        if not is_plain(weight, tile.dtype):
            convert_blocks(tile[:, 0 : full - start, :], raw[:, 0 : full - start, :], weight, start)
    if end > full:
        # The short block covers fewer partitions than the others, so it takes a DMA of its own.
        short = depth - full * PARTITIONS
        nisa.dma_copy(dst=raw[0:short, full - start, :], src=matrix[full * PARTITIONS : depth, :])
        if not is_plain(weight, tile.dtype):
            last = slice(full - start, full - start + 1)
            convert_blocks(tile[0:short, last, :], raw[0:short, last, :], weight, full)


def transpose_block_range(tile, x, start):
    """Load columns of x [row, K] from HBM, transposed by DMA, into all blocks of an SBUF tile [k in block, block, row].

    The first block of the tile takes columns start * 128 … of x. If the last block of K is short, the
    partitions of the tile beyond K are not written.
    """
    depth = x.shape[1]
    end = start + tile.shape[1]
    full = min(end, depth // PARTITIONS)
    if full > start:
        source = x[:, start * PARTITIONS : full * PARTITIONS].reshape_dim(1, (full - start, PARTITIONS))
        nisa.dma_transpose(dst=tile[:, 0 : full - start, :], src=source)
    if end > full:
        short = depth - full * PARTITIONS
        nisa.dma_transpose(dst=tile[0:short, full - start, :], src=x[:, full * PARTITIONS : depth])


def allocate_sums(tiles, panels):
    """Allocate PSUM tiles for the sums of a product: sums[i][j] is float32 [row, column], for tiles[i] and panels[j].

    tiles: ranges (start, end) of rows. panels: ranges (start, end) of columns. The sums are not zeroed:
    `add_products` overwrites them with the products of block 0.
    """
    sums = []
    for start, end in tiles:
        row = []
        for left, right in panels:
            row.append(nl.ndarray((end - start, right - left), dtype=nl.float32, buffer=nl.psum))
        sums.append(row)
    return sums


def multiply_block_pair(dst, stationary, moving, accumulate):
    """Add the product of two K blocks to a PSUM tile, or overwrite it: fp8 operands [k, 2, column], at double rate.

    On gen2, which lacks the mode, two products follow each other.
    """
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        nisa.nc_matmul(dst=dst, stationary=stationary[:, 0, :], moving=moving[:, 0, :], accumulate=accumulate)
        nisa.nc_matmul(dst=dst, stationary=stationary[:, 1, :], moving=moving[:, 1, :], accumulate=True)
    else:
        nisa.nc_matmul(
            dst=dst,
            stationary=stationary,
            moving=moving,
            accumulate=accumulate,
            perf_mode=nisa.matmul_perf_mode.double_row,
        )


def add_products(sums, stationary, tiles, moving, panels, first, depth, runs=False):
    """Add the products of some K blocks to the sums of `allocate_sums` in PSUM; block 0 overwrites them instead.

    sums[i][j] accumulates stationary[:, :, rows of tiles[i]]^T @ moving[:, :, columns of panels[j]].

    Args:
        sums: float32 tiles [row, column] in PSUM, a list for each row tile.
        stationary: SBUF tile [k in block, block, row] with all blocks of the contraction.
        tiles: ranges (start, end) of rows.
        moving: SBUF tile [k in block, block, column]; its block 0 is block `first` of the contraction.
        panels: ranges (start, end) of columns.
        first: number of blocks of the contraction before those in `moving`.
        depth: length K of the whole contraction.
        runs: with True both operands have element k on partition k // C, block k % C, where C = ceil(K /
            128); with False on partition k % 128, block k // 128.
    """
    # Blocks are the outermost loop: all row tiles use a block while the next part is still on its way.
    for within in range(moving.shape[1]):
        block = first + within
        # Partitions behind the end of the contraction were never loaded, so the matmul leaves them out.
        used = count_block_partitions(depth, block, runs)
        for tile in range(len(tiles)):
            start, end = tiles[tile]
            for panel in range(len(panels)):
                left, right = panels[panel]
                nisa.nc_matmul(
                    dst=sums[tile][panel],
                    stationary=stationary[0:used, block, start:end],
                    moving=moving[0:used, within, left:right],
                    accumulate=block > 0,
                )

"""Products of blocks in SBUF, arranged so that neither loads nor results keep the Tensor engine waiting.

Both operands of a product lie in blocks, [k in block, block, column], as in `tiles`, and are loaded in *parts* of some
blocks each. While the first parts arrive, several row tiles accumulate together, block by block, so that a loaded block
gives more work than its load takes. Once the moving operand is in SBUF, one row tile after the other takes all its
blocks, and its sums are read out of PSUM while the next row tile accumulates.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, aligned_tile, in_block
from nki_kernels.weights import convert, is_plain

PART_ELEMENTS = 4096
"""Elements per partition that one DMA brings: 1 MiB in bfloat16, which moves at the full rate."""


def growing_ranges(count, columns, first, most=PART_ELEMENTS):
    """Return ranges (start, end) that cover `count` blocks of so many columns.

    The first one has `first` blocks, each further one twice as many, up to `most` elements per partition.
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


def block_tile(depth, count, columns, dtype):
    """Return an empty tile for `count` blocks of a matrix [depth, columns], into which a DMA may transpose."""
    return aligned_tile((min(depth, PARTITIONS), count, columns), dtype)


def load_block_range(tile, weight, start):
    """Load blocks of a WeightMatrix, from block `start` on, into all blocks of a tile, in the tile's dtype."""
    matrix, depth = weight.elements, weight.elements.shape[0]
    end = start + tile.shape[1]
    raw = tile
    if not is_plain(weight, tile.dtype):
        raw = nl.ndarray(tile.shape, dtype=matrix.dtype, buffer=nl.sbuf)
    full = min(end, depth // PARTITIONS)
    if full > start:
        rows = matrix[start * PARTITIONS : full * PARTITIONS, :]
        source = rows.reshape_dim(0, (full - start, PARTITIONS)).permute((1, 0, 2))
        nisa.dma_copy(dst=raw[:, 0 : full - start, :], src=source)
        if not is_plain(weight, tile.dtype):
            convert(tile[:, 0 : full - start, :], raw[:, 0 : full - start, :], weight)
    if end > full:
        # The short block covers fewer partitions than the others, so it takes a DMA of its own.
        short = depth - full * PARTITIONS
        nisa.dma_copy(dst=raw[0:short, full - start, :], src=matrix[full * PARTITIONS : depth, :])
        if not is_plain(weight, tile.dtype):
            convert(tile[0:short, full - start, :], raw[0:short, full - start, :], weight)


def transpose_block_range(tile, x, start):
    """Transpose blocks of x [rows, K] @ HBM, from block `start` on, into all blocks of a tile, by DMA."""
    depth = x.shape[1]
    end = start + tile.shape[1]
    full = min(end, depth // PARTITIONS)
    if full > start:
        source = x[:, start * PARTITIONS : full * PARTITIONS].reshape_dim(1, (full - start, PARTITIONS))
        nisa.dma_transpose(dst=tile[:, 0 : full - start, :], src=source)
    if end > full:
        short = depth - full * PARTITIONS
        nisa.dma_transpose(dst=tile[0:short, full - start, :], src=x[:, full * PARTITIONS : depth])


def empty_sums(tiles, panels):
    """Allocate a float32 PSUM tile for each row range and column panel; return a list of lists."""
    sums = []
    for start, end in tiles:
        row = []
        for left, right in panels:
            row.append(nl.ndarray((end - start, right - left), dtype=nl.float32, buffer=nl.psum))
        sums.append(row)
    return sums


def add_products(sums, stationary, tiles, moving, panels, first, depth, runs=False):
    """Add what the blocks of `moving`, from block `first` on, contribute to the sums of row tiles and panels.

    stationary: all blocks, of which row tiles are column ranges; moving: [k in block, block, column], of which panels
    are ranges of columns; depth: the length of the whole contraction; runs: whether operands lie in runs (see `rows`).
    """
    # Blocks are the outermost loop: all row tiles use a block while the next part is still on its way.
    for within in range(moving.shape[1]):
        block = first + within
        # Partitions behind the end of the contraction were never loaded, so the matmul leaves them out.
        used = in_block(depth, block, runs)
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

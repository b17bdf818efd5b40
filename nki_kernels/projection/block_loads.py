"""Copies between matrices in HBM and tiles in SBUF that hold them in blocks: [row in block, block, column].

A tile of `height` partitions holds row r of the matrix on partition r % height, in block r // height. The
last block is short if `height` does not divide the number of rows.
"""

from __future__ import annotations

from nki_kernels.dma import transfer


def load_rows_into(tile, matrix, queue):
    """Load a matrix [rows, columns] of HBM into an SBUF tile [row in block, block, column], on a queue of `dma`.

    Row r goes to partition r % height, block r // height, where height is the tile's number of partitions.
    One DMA brings the full blocks, another one the short block, if there is one. In the short block the
    partitions without a row keep what they held.
    """
    for block, rows in pair_blocks_with_rows(tile, matrix):
        transfer(block, rows, queue)


def store_rows_from(matrix, tile, queue):
    """Store an SBUF tile [row in block, block, column] to a matrix [rows, columns] of HBM, on a queue of `dma`.

    Row r comes from partition r % height, block r // height, where height is the tile's number of partitions.
    One DMA takes the full blocks, another one the short block, if there is one. Partitions of the short block
    beyond the last row are not read.
    """
    for block, rows in pair_blocks_with_rows(tile, matrix):
        transfer(rows, block, queue)


def pair_blocks_with_rows(tile, matrix):
    """Return pairs (view of an SBUF tile, view of a matrix) of equal shape, which together cover the matrix.

    The first pair has the full blocks, [row in block, block, column]; the second one the short block, [row,
    column]. A pair without rows is left out, so the list has one or two pairs.
    """
    height = tile.shape[0]
    depth = matrix.shape[0]
    full = depth // height
    views = []
    if full > 0:
        rows = matrix[0 : full * height].reshape_dim(0, (full, height)).permute((1, 0, 2))
        views.append((tile[:, 0:full, :], rows))
    short = depth - full * height
    if short > 0:
        views.append((tile[0:short, full, :], matrix[full * height : depth]))
    return views

"""Matrices of HBM to blocks in SBUF, and back: [row in block, block, column].

The blocks of a tile have as many rows as it has partitions; the last one may be short.
"""

from __future__ import annotations

from nki_kernels.dma import transfer


def load_rows_into(tile, matrix, queue):
    """Load rows of HBM into a tile [row in block, block, columns]: a DMA for full blocks, one for the short block."""
    for block, rows in full_and_short(tile, matrix):
        transfer(block, rows, queue)


def store_rows_from(matrix, tile, queue):
    """Store a tile [row in block, block, columns] to rows of HBM, with the DMAs of `load_rows_into`."""
    for block, rows in full_and_short(tile, matrix):
        transfer(rows, block, queue)


def full_and_short(tile, matrix):
    """Return (blocks of a tile, matching rows of a matrix) for the full blocks and for the short block."""
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

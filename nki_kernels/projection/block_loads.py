"""Matrices of HBM to blocks in SBUF, and back: [row in block, block, column].

The blocks of a tile have as many rows as it has partitions; the last one may be short.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import transfer
from nki_kernels.tiles import PARTITIONS, blocks


def load_cast(matrix, dtype, queue):
    """A matrix [K, columns] of HBM as blocks [k in block, block, columns], cast on chip if need be."""
    depth, columns = matrix.shape
    shape = (min(PARTITIONS, depth), blocks(depth), columns)
    result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    load_cast_into(result, matrix, queue)
    return result


def load_cast_into(tile, matrix, queue):
    """A matrix [K, columns] of HBM into blocks [k in block, block, columns], cast on chip if need be."""
    if matrix.dtype == tile.dtype:
        load_rows_into(tile, matrix, queue)
        return
    depth = matrix.shape[0]
    raw = nl.ndarray(tile.shape, dtype=matrix.dtype, buffer=nl.sbuf)
    load_rows_into(raw, matrix, queue)
    full = depth // PARTITIONS
    if full > 0:
        nisa.tensor_copy(dst=tile[:, 0:full, :], src=raw[:, 0:full, :])
    short = depth - full * PARTITIONS
    if short > 0:
        nisa.tensor_copy(dst=tile[0:short, full, :], src=raw[0:short, full, :])


def load_rows_into(tile, matrix, queue):
    """Rows of HBM into a tile [row in block, block, columns]: one DMA for the full blocks, one for the short one."""
    for block, rows in full_and_short(tile, matrix):
        transfer(block, rows, queue)


def store_rows_from(matrix, tile, queue):
    """A tile [row in block, block, columns] to rows of HBM, as load_rows_into."""
    for block, rows in full_and_short(tile, matrix):
        transfer(rows, block, queue)


def full_and_short(tile, matrix):
    """(blocks of a tile, their rows of a matrix in the same form) for the full blocks and for the short one."""
    height = tile.shape[0]
    depth = matrix.shape[0]
    full = depth // height
    found = []
    if full > 0:
        rows = matrix[0 : full * height].reshape_dim(0, (full, height)).permute((1, 0, 2))
        found.append((tile[:, 0:full, :], rows))
    short = depth - full * height
    if short > 0:
        found.append((tile[0:short, full, :], matrix[full * height : depth]))
    return found

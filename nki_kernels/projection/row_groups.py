"""Row groups: how activations are tiled along the sequence, loaded, normalised and transposed for a product.

A row tile is [row, H] with up to 128 rows. A row group has up to four row tiles, which share one pass over the weights.
All groups use the same buffers: a row tile is free once it is transposed, its transpose once it is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import transfer
from nki_kernels.norms.row_tiles import normalise, row_statistics
from nki_kernels.tiles import PARTITIONS, aligned_tile, blocks, transpose_rows

LOAD_COLUMNS = 2048
"""Columns of one load of a row tile: 512 KiB in bfloat16."""

VECTOR_SHARE = 2
"""The Vector engine copies one of so many PSUM banks of transposes to SBUF, the Scalar engine the others.

On gen2 the Scalar engine copies all: the two exclude each other on PSUM there, and the Vector engine has the norm.
"""


@dataclass
class RowGroup(nl.NKIObject):
    """`rows` rows from `first_row` on; if rows are cut over ranks, these rows of every rank."""

    first_row: int
    rows: int


@dataclass
class PlannedLoad(nl.NKIObject):
    """A DMA from HBM to SBUF that is triggered later, between other loads of the same queue."""

    dst: nl.NkiTensor
    src: nl.NkiTensor


def rows_per_rank(ranks):
    """Return the rows of each rank in a full row tile if rows are cut over so many ranks."""
    return PARTITIONS // ranks


def row_tile_height(ranks):
    """Return the rows of a full row tile if rows are cut over so many ranks: 126 for three, for instance."""
    return ranks * rows_per_rank(ranks)


def split_by_rank(matrix, ranks):
    """View rows [rank * row, columns] of HBM as [rank, row, columns]."""
    return matrix.reshape_dim(0, (ranks, matrix.shape[0] // ranks))


def row_groups(rows, rows_per_group):
    """Divide rows into groups of `rows_per_group`; the last one may be short."""
    groups = []
    for first in range(0, rows, rows_per_group):
        groups.append(RowGroup(first, min(rows_per_group, rows - first)))
    return groups


def row_tiles(buffers, rows, height):
    """Return views of row tile buffers for `rows` rows, `height` of them in each tile but the last."""
    tiles = []
    for m in range(blocks(rows, height)):  # m: row tile
        tiles.append(buffers[m][0 : min(height, rows - m * height), :])
    return tiles


def plan_loads(tiles, rows):
    """Plan the loads of rows [rank, row, H] of HBM into row tiles, up to LOAD_COLUMNS columns each.

    A row tile [rank * row, H] holds the same rows of every rank.
    """
    ranks, _, hidden = rows.shape
    loads = []
    first = 0
    for tile in tiles:
        end = first + tile.shape[0] // ranks
        # A row tile comes in several loads, so that they can be spread between loads of weights in one queue.
        for left in range(0, hidden, LOAD_COLUMNS):
            right = min(hidden, left + LOAD_COLUMNS)
            loads.append(PlannedLoad(tile[:, left:right], rows[:, first:end, left:right]))
        first = end
    return loads


def trigger_loads(loads, queue):
    """Trigger planned loads on a queue of `dma`."""
    for load in loads:
        transfer(load.dst, load.src, queue)


def share(items, index, count):
    """Return share `index` of `count` about equal shares of a list; an empty list from share `count` on."""
    return items[len(items) * index // count : len(items) * (index + 1) // count]


def normalise_tiles(results, tiles, norm):
    """Normalise row tiles. The Scalar engine reduces tile m while the Vector engine scales tile m - 1.

    Without a norm nothing is done; the caller passes `tiles` as `results`.
    """
    if norm is None:
        return
    statistics = []
    for m in range(len(tiles) + 1):  # m: row tile
        if m < len(tiles):
            statistics.append(row_statistics(tiles[m], norm))
        if m > 0:
            normalise(results[m - 1], tiles[m - 1], statistics[m - 1], norm)


def vector_share():
    """Return VECTOR_SHARE, or 0 on gen2: the Vector engine copies one of so many PSUM banks."""
    return 0 if nisa.get_nc_version() == nisa.nc_version.gen2 else VECTOR_SHARE


def transpose_tiles(transposed, tiles, first_row):
    """Transpose row tiles of a group into rows `first_row` … of its K blocks [k in block, block, row]."""
    row = first_row
    for tile in tiles:
        transpose_rows(transposed, row, tile, vector_share())
        row += tile.shape[0]


def blocks_tile(columns, rows, dtype):
    """Allocate K blocks [k in block, block, row] for rows of so many columns, into which a DMA may transpose."""
    return aligned_tile((min(columns, PARTITIONS), blocks(columns), rows), dtype)


def starts(size, width):
    """Return 0, width, 2 * width … below `size`."""
    result = []
    for start in range(0, size, width):
        result.append(start)
    return result


def item_bytes(dtype):
    """Return the bytes of an element."""
    return 4 if dtype == nl.float32 else 2


def bytes_of(tile):
    """Return the bytes per partition of a tile [row, column], 0 for None."""
    return 0 if tile is None else tile.shape[1] * item_bytes(tile.dtype)

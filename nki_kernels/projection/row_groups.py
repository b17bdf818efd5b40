"""Groups of rows on their way to a product: loaded, normalised and transposed while the product before is under way.

A group has up to four row tiles of 128 rows. Its tiles take the places of those of the group before in SBUF, and so do
their transposes, once those of the group before were multiplied.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import transfer
from nki_kernels.projection.normalised_rows import normalise, statistics, transpose_rows
from nki_kernels.tiles import PARTITIONS, aligned_tile, blocks

LOAD_COLUMNS = 2048
"""Columns of one load of a row tile: 512 KiB in bfloat16."""

VECTOR_SHARE = 2
"""The Vector engine copies one of so many PSUM banks of transposes to SBUF, the Scalar engine the others.

On gen2 the Scalar engine copies all: the two exclude each other on PSUM there, and the Vector engine has the norm.
"""


def own_height(ranks):
    """Own rows of each rank in a row tile: all of its rows for one."""
    return PARTITIONS // ranks


def of_ranks(matrix, ranks):
    """Rows [rank * row, columns] of HBM as [rank, row, columns]."""
    return matrix.reshape_dim(0, (ranks, matrix.shape[0] // ranks))


def row_groups(rows, most):
    """(first row, rows) of each group of up to `most` rows."""
    groups = []
    for first in range(0, rows, most):
        groups.append((first, min(most, rows - first)))
    return groups


def row_tiles(places, rows, height):
    """The tiles of `places` cut to `rows` rows, `height` of them in each tile but the last."""
    tiles = []
    for number in range(blocks(rows, height)):
        tiles.append(places[number][0 : min(height, rows - number * height), :])
    return tiles


def loads_of(tiles, rows):
    """(part of a tile, its source) for rows [rank, row, H] of HBM, in parts of up to LOAD_COLUMNS columns.

    A tile holds the same rows of every rank, [rank, row].
    """
    ranks, _, hidden = rows.shape
    loads = []
    first = 0
    for number in range(len(tiles)):
        end = first + tiles[number].shape[0] // ranks
        for left in range(0, hidden, LOAD_COLUMNS):
            right = min(hidden, left + LOAD_COLUMNS)
            loads.append((tiles[number][:, left:right], rows[:, first:end, left:right]))
        first = end
    return loads


def load_all(loads, queue):
    """Trigger loads on a queue of `dma`."""
    for number in range(len(loads)):
        tile, source = loads[number]
        transfer(tile, source, queue)


def share_of(items, number, count):
    """Share `number` of `count` about equal shares of a list; nothing from share `count` on."""
    return items[len(items) * number // count : len(items) * (number + 1) // count]


def normalise_tiles(results, tiles, norm, scratch):
    """Normalise row tiles; the Scalar engine squares one tile while the Vector engine scales the one before.

    Without a norm nothing is done; the caller passes `tiles` as `results`.
    """
    if norm is None:
        return
    found = []
    for number in range(len(tiles)):
        found.append(statistics(tiles[number], norm, scratch))
        if number > 0:
            normalise(results[number - 1], tiles[number - 1], found[number - 1], norm)
    if len(tiles) > 0:
        last = len(tiles) - 1
        normalise(results[last], tiles[last], found[last], norm)


def vector_share():
    """VECTOR_SHARE, or 0 on gen2: of how many PSUM banks the Vector engine copies one."""
    return 0 if nisa.get_nc_version() == nisa.nc_version.gen2 else VECTOR_SHARE


def transpose_tiles(x_blocks, tiles, first_row):
    """Row tiles of a group, whose first row is `first_row`, into its blocks [k in block, block, row]."""
    row = first_row
    for tile in tiles:
        transpose_rows(x_blocks, row, tile, vector_share())
        row += tile.shape[0]


def blocks_tile(columns, rows, dtype):
    """Return a tile [k in block, block, row] for rows of so many columns, into which a DMA may transpose."""
    return aligned_tile((min(columns, PARTITIONS), blocks(columns), rows), dtype)


def starts(size, width):
    """0, width, 2 * width … below `size`."""
    found = []
    for start in range(0, size, width):
        found.append(start)
    return found


def item_bytes(dtype):
    """Bytes of an element."""
    return 4 if dtype == nl.float32 else 2


def bytes_of(tile):
    """Bytes per partition of a tile [rows, columns], 0 for None."""
    return 0 if tile is None else tile.shape[1] * item_bytes(tile.dtype)

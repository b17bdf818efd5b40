"""Row groups: how activations are tiled along the sequence, loaded, normalised and transposed for a product.

A row tile is an SBUF tile [row, H] with up to 128 rows. A row group is up to four row tiles that share one
pass over the weights. All groups use the same buffers: a row tile is free once it is transposed, its
transpose once it is multiplied.

With sequence parallelism the rows are cut over N ranks, an equal number for each. A full row tile [rank *
row, H] then has 128 // N rows of every rank: first those of rank 0, then the same ones of rank 1, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import transfer
from nki_kernels.norms.row_tiles import compute_row_statistics, normalise, standardise
from nki_kernels.projection.rows import spread_into
from nki_kernels.tiles import PARTITIONS, allocate_aligned_tile, blocks, transpose_rows

LOAD_COLUMNS = 2048
"""Columns of one load of a row tile: 512 KiB in bfloat16."""

VECTOR_SHARE = 2
"""The Vector engine copies one of so many PSUM banks of transposes to SBUF, the Scalar engine the others.

On gen2 the Scalar engine copies all, because there only one of the two reads PSUM at a time and the Vector
engine computes the norm.
"""


@dataclass
class RowGroup(nl.NKIObject):
    """Rows first_row … first_row + rows - 1, which share one pass over the weights.

    If rows are cut over ranks, both fields count the rows of one rank, and the group has these rows of every
    rank.
    """

    first_row: int
    rows: int


@dataclass
class PlannedLoad(nl.NKIObject):
    """A DMA from a view `src` in HBM to a view `dst` in SBUF that `trigger_loads` issues later, among other loads."""

    dst: nl.NkiTensor
    src: nl.NkiTensor


def count_rows_per_rank(ranks):
    """Return how many rows of one rank a full row tile holds if rows are cut over `ranks` ranks: 128 // ranks."""
    return PARTITIONS // ranks


def count_tile_rows(ranks):
    """Return how many rows a full row tile has if rows are cut over `ranks` ranks: ranks * (128 // ranks).

    All 128 partitions are used if `ranks` divides 128; for three ranks 126 are.
    """
    return ranks * count_rows_per_rank(ranks)


def split_by_rank(matrix, ranks):
    """View a matrix [rank * row, columns] of HBM, all rows of rank 0 first, as [rank, row, columns]."""
    return matrix.reshape_dim(0, (ranks, matrix.shape[0] // ranks))


def divide_into_groups(rows, rows_per_group):
    """Return the RowGroups of rows 0 … rows - 1: `rows_per_group` rows in each, fewer in the last one if need be."""
    groups = []
    for first in range(0, rows, rows_per_group):
        groups.append(RowGroup(first, min(rows_per_group, rows - first)))
    return groups


def view_row_tiles(buffers, rows, height):
    """Return views of the first row tile buffers that together hold `rows` rows: `height` rows each, fewer in the last.

    buffers: list of SBUF tiles [height, H], used in order.
    """
    tiles = []
    for m in range(blocks(rows, height)):  # m: row tile
        tiles.append(buffers[m][0 : min(height, rows - m * height), :])
    return tiles


def plan_loads(tiles, rows):
    """Return the PlannedLoads that fill SBUF row tiles [rank * row, H] from `rows`, [rank, row, H] in HBM.

    Nothing is loaded yet. The first tile takes the first rows of every rank, all those of rank 0 before those
    of rank 1; the next tile takes the rows after them. Each load has up to LOAD_COLUMNS columns of one tile.
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
    """Issue the DMAs of a list of PlannedLoads, in the order of the list, on a queue of `dma`."""
    for load in loads:
        transfer(load.dst, load.src, queue)


def select_share(items, index, count):
    """Return slice number `index` of a list that is cut into `count` consecutive slices of nearly equal length.

    index: from 0 on. From `count` on, the slice is empty.
    """
    return items[len(items) * index // count : len(items) * (index + 1) // count]


def normalise_tiles(results, tiles, norm):
    """Write the normalised rows of each SBUF row tile [row, H] of `tiles` to the tile of `results` at the same index.

    The two may be the same list. norm: RowNorm, or None. With None nothing is written, so the caller passes
    `tiles` as `results`. The Scalar engine computes the statistics of tile m while the Vector engine scales
    tile m - 1. For a RowNorm without a weight the Vector engine does both.
    """
    if norm is None:
        return
    if norm.weight is None:
        for m in range(len(tiles)):  # m: row tile
            standardise(results[m], tiles[m], norm.eps)
        return
    statistics = []
    for m in range(len(tiles) + 1):  # m: row tile
        if m < len(tiles):
            statistics.append(compute_row_statistics(tiles[m], norm))
        if m > 0:
            normalise(results[m - 1], tiles[m - 1], statistics[m - 1], norm)


def choose_vector_share():
    """Return for `tiles.copy_bank` of how many PSUM banks of transposes the Vector engine copies one: VECTOR_SHARE.

    On gen2 it is 0, with which the Scalar engine copies all.
    """
    return 0 if nisa.get_nc_version() == nisa.nc_version.gen2 else VECTOR_SHARE


def transpose_tiles(transposed, tiles, first_row, norm=None, image_row=0, vector_share=None):
    """Transpose SBUF row tiles [row, K] on the Tensor engine into the SBUF tile `transposed`, [k in block, block, row].

    The first row of the first tile becomes row `first_row` of `transposed`, and all others follow in order.

    Args:
        norm: BlockNorm whose weight and bias are applied on the way, or None.
        image_row: index of the first row among the rows of all images, which the norm tells apart.
        vector_share: see `copy_bank`; None for `choose_vector_share`. Only without a norm.
    """
    row = first_row
    if vector_share is None:
        vector_share = choose_vector_share()
    for tile in tiles:
        end = row + tile.shape[0]
        if norm is None:
            transpose_rows(transposed, row, tile, vector_share)
        else:
            spread_into(transposed[:, :, row:end], tile, False, norm, image_row + row - first_row)
        row = end


def allocate_transposed(columns, rows, dtype):
    """Allocate an SBUF tile [k in block, block, row] for the transpose of `rows` rows of `columns` elements.

    It has ceil(columns / 128) blocks and is not initialised. A DMA may transpose into it, see `allocate_aligned_tile`.
    """
    return allocate_aligned_tile((min(columns, PARTITIONS), blocks(columns), rows), dtype)


def list_starts(size, width):
    """Return the multiples of `width` below `size`: [0, width, 2 * width, …]."""
    result = []
    for start in range(0, size, width):
        result.append(start)
    return result


def item_bytes(dtype):
    """Return the bytes of an element: 4 for float32, 2 for every other dtype."""
    return 4 if dtype == nl.float32 else 2


IMAGE_NORMS = 3
"""RowNorms of images that SBUF holds at one time: one is applied while the next one is loaded, and one is kept."""


def count_norm_bytes(norm):
    """Return the bytes of each partition that the weight and the bias of a RowNorm take, with those of other images."""
    if norm.images is None:
        return count_bytes(norm.weight) + count_bytes(norm.bias)
    rows = norm.images.norm
    return IMAGE_NORMS * rows.weight.shape[1] * (item_bytes(nl.float32) + item_bytes(rows.bias.dtype))


def count_bytes(tile):
    """Return the bytes that an SBUF tile takes of each partition; 0 for None."""
    if tile is None:
        return 0
    elements = 1
    for size in tile.shape[1:]:
        elements *= size
    return elements * item_bytes(tile.dtype)

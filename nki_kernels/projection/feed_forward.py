"""Groups of rows on their way through a feed-forward block: the order in which `mlp` issues its parts.

The product of the group before with w_down is computed in turns with those of this group with w_gate and w_up, while
the rows of the next one are loaded and normalised. A stage is what all groups share; `mlp` makes it.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cores import from_other_core, part
from nki_kernels.dma import STATIC
from nki_kernels.projection.gated_product import columns_at_once, gated_columns
from nki_kernels.projection.products import add_products
from nki_kernels.projection.residual_product import chunk_width, product_chunk
from nki_kernels.projection.row_groups import (
    blocks_tile,
    item_bytes,
    load_all,
    loads_of,
    normalise_tiles,
    of_ranks,
    own_height,
    row_tiles,
    share_of,
    starts,
    transpose_tiles,
)
from nki_kernels.projection.sequence import rows_of
from nki_kernels.tiles import PARTITIONS, blocks, ranges

INNER_UNIT = 64
"""Two cores divide the intermediate into whole units of so many columns: halves of a block share the array."""

GROUP_TILES = 4
"""Row tiles of the largest group: 512 rows, the columns of the widest moving tile that every chip takes."""

STREAM_BYTES = 48 * 1024
"""Bytes per partition that a group leaves to weights, residuals and results on their way."""


def pipeline(stage, job, groups):
    """The block for groups of rows: each is loaded, normalised and transposed while those before it are multiplied."""
    x, ranks = stage["x"], stage["ranks"]
    hidden = x.shape[1]
    most = ranks * groups[0][1]
    height = ranks * own_height(ranks)
    places = []
    for _ in range(blocks(most, height)):
        places.append(nl.ndarray((min(most, height), hidden), dtype=x.dtype, buffer=nl.sbuf))
    stage["blocks"] = blocks_tile(hidden, most, x.dtype)
    loaded = row_tiles(places, most, height)
    load_all(loads_of(loaded, rows_of_group(stage, groups[0])), STATIC)
    normalised = loaded
    if ranks == 1 and job["residual"] is not None and keeps_rows(x, stage["weights"][0].shape[1]):
        if stage["norm"] is not None:
            normalised = [nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)]
        start, end = stage["columns"]
        job["kept"] = loaded[0][:, start:end].reshape((x.shape[0], 1, end - start))
    if ranks == 1:
        normalise_tiles(normalised, loaded, stage["norm"], stage["scratch"])
    transpose_tiles(stage["blocks"], normalised, 0)
    inner = None
    for step in range(len(groups) + 1):
        group = groups[step] if step < len(groups) else None
        before = groups[step - 1] if step > 0 else None
        waiting, loads = [], []
        if step + 1 < len(groups):
            following = groups[step + 1]
            waiting = row_tiles(places, ranks * following[1], height)
            loads = loads_of(waiting, rows_of_group(stage, following))
        inner = overlap(stage, job, group, before, inner, waiting, loads)


def rows_of_group(stage, group):
    """The rows of a group in HBM, [rank, row, H]."""
    ranks = stage["ranks"]
    first, count = group
    return of_ranks(rows_of(stage["rows"], ranks * first, ranks * (first + count)), ranks)


def overlap(stage, job, group, before, before_parts, waiting, loads):
    """Multiply one group with w_gate and w_up, and the one before it with w_down, in turns; returns its intermediate.

    The intermediate has a part for each core that computes one. So loads, stores and the engines beside the Tensor
    engine have work all the time. waiting: the row tiles of the next group, which are loaded by `loads` and normalised
    meanwhile, and transposed after the last use of the blocks.
    """
    result = None
    columns = []
    ranks = stage["ranks"]
    height = ranks * own_height(ranks)
    chunks = [] if before is None else starts(job["y"].shape[1], chunk_width(ranks * before[1], ranks))
    if group is not None:
        rows = ranks * group[1]
        inner = stage["weights"][0].shape[1]
        if job["factors"] is not None:
            x_blocks, hidden = stage["blocks"][:, :, 0:rows], stage["x"].shape[1]
            gate_rows(job["factors"], x_blocks, stage["row_gate"], hidden, height)
        result = inner_tile(inner, rows, stage)
        columns = starts(inner, columns_at_once(stage["weights"], rows))
    loading = max(1, len(columns) // 2)
    done = 0
    transposed = 0
    for chunk in range(len(chunks) + 1):
        while done < len(columns) and done * len(chunks) <= chunk * len(columns):
            normalise_share(stage, waiting, done - loading, len(columns) - loading)
            passing = share_of(loads, done, loading)
            gated_columns(
                result[:, 0 : blocks(inner), :],
                stage["blocks"][:, :, 0:rows],
                stage["weights"],
                stage["biases"],
                stage["function"],
                columns[done],
                passing,
                stage["runs"],
            )
            done += 1
        if done == len(columns) and chunk == 0 and loading == len(columns):
            normalise_share(stage, waiting, 0, 1)
        if done == len(columns) and transposed < len(waiting):
            transpose_tiles(stage["blocks"], waiting[transposed : transposed + 1], transposed * height)
            transposed += 1
        if chunk < len(chunks):
            product_chunk(job, before_parts, before[0], chunks[chunk])
    transpose_tiles(stage["blocks"], waiting[transposed:], transposed * height)
    if stage["exchanges"] and group is not None:
        return [result, from_other_core(result)]
    return [result]


def gate_rows(factors, x, weight, hidden, height):
    """Append sigmoid(x @ weight) of each row tile, of `height` rows, to `factors`, [rows, 1] float32.

    x [h in block, block, row] has `hidden` elements of each row, and so has weight [h in block, block, 1].
    """
    for first, last in ranges(0, x.shape[2], height):
        bank = nl.ndarray((last - first, 1), dtype=nl.float32, buffer=nl.psum)
        add_products([[bank]], x, [(first, last)], weight, [(0, 1)], 0, hidden)
        factor = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=factor, op=nl.sigmoid, data=bank)
        factors.append(factor)


def inner_tile(inner, rows, stage):
    """A tile for `inner` columns of the intermediate; cores exchange tiles of the larger part, all of them defined."""
    if not stage["exchanges"]:
        return blocks_tile(inner, rows, stage["blocks"].dtype)
    first, last = part(stage["inner"], INNER_UNIT, 0)
    result = blocks_tile(last - first, rows, stage["blocks"].dtype)
    full = inner // PARTITIONS
    if full * PARTITIONS < last - first:
        nisa.memset(dst=result[:, full:, :], value=0.0)
    return result


def normalise_share(stage, tiles, number, count):
    """Normalise share `number` of `count` of row tiles; there is none below 0, nor of rows that were gathered."""
    if number >= 0 and stage["ranks"] == 1:
        own = share_of(tiles, number, count)
        normalise_tiles(own, own, stage["norm"], stage["scratch"])


def tiles_at_once(hidden, inner, dtype, held, ranks):
    """Row tiles of a group: its rows, their transposes and two intermediates fit in SBUF beside `held` bytes.

    0 if those of one row tile do not fit: then there is room for one intermediate, and no group overlaps another.
    """
    if ranks > 1:
        held += 2 * item_bytes(dtype) * hidden  # own rows on their way to the others
    each = item_bytes(dtype) * 2 * (blocks(hidden) + blocks(inner)) * PARTITIONS
    room = nl.tile_size.sbuf_fmax_bytes - STREAM_BYTES - held
    return min(GROUP_TILES, room // each)


def keeps_rows(x, inner):
    """Whether the rows stay in SBUF for the residual beside the normalised rows: those of one row tile, if they fit."""
    tokens, hidden = x.shape
    needed = item_bytes(x.dtype) * (3 * hidden + (blocks(hidden) + blocks(inner)) * tokens)
    return tokens <= PARTITIONS and needed + STREAM_BYTES <= nl.tile_size.sbuf_fmax_bytes

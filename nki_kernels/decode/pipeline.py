"""The software pipeline of decode attention: what one launch holds, and the four stages that a group passes through.

Each engine works in program order, so the stages of different groups alternate: while the Tensor engine scores one
group, the Vector engine finds the maximum of the one before, whose exponentials the product of a third one hides. Work
that has queries for several passes over a loaded group takes one item of the pipeline for each.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.cache import (
    buffers,
    clear_values,
    load_keys,
    load_new_values,
    load_values,
    new_value_rows,
    places,
    places_in_pages,
    scatter,
)
from nki_kernels.decode.pages import by_unit, gather, row_tiles, run_numbers, transpose_keys
from nki_kernels.decode.products import finish, mix, output_block, score
from nki_kernels.decode.sizes import first_unit, groups_of_blocks, query_parts, units_in
from nki_kernels.decode.softmax import (
    add_up_chunks,
    capped,
    causal_among_new,
    earlier_keys,
    key_positions,
    largest_by_partition,
    largest_of_queries,
    masked_tiles,
    on_all_partitions,
    select,
    weights_relative_to,
    within_window,
)
from nki_kernels.decode.tokens import load_tokens, transposed_tokens
from nki_kernels.tiles import blocks

QUADRANT = 32
"""Partitions at whose multiples a tile of few partitions begins."""

CLEARED_IN = 4
"""Pieces in which values are cleared, so that the maximum of a group does not wait for all of them."""


class Work(nl.NKIObject):
    """Tiles and tensors of one launch; item i is the group i // len(parts) with the queries of part i % len(parts)."""

    def __init__(self, sizes, scale, k_cache, v_cache, v, o, slots, block_tables, options):
        self.sizes = sizes
        self.window, self.softcap, self.sinks = options
        self.factor = scale if self.softcap is None else scale / self.softcap
        self.scale = scale if self.softcap is None else self.softcap
        self.k_cache = k_cache
        self.v_cache = v_cache
        self.v = v
        self.o = o
        self.slots = slots
        self.block_tables = block_tables
        self.groups = groups_of_blocks(sizes)
        self.parts = query_parts(sizes)
        self.items = len(self.groups) * len(self.parts)
        self.scores = []
        self.weights = []
        self.block = None

    def box(self, item):
        """Sequences and kv heads of an item."""
        return self.groups[item // len(self.parts)][0]

    def part(self, item):
        """Queries of an item."""
        return self.parts[item % len(self.parts)]

    def begins_group(self, item):
        """Whether an item is the first one of its group."""
        return item % len(self.parts) == 0


def start(work, q, k, tokens, norms):
    """Load what the first groups need, and bring queries and keys of the new tokens into their layouts."""
    sizes, positions = work.sizes, tokens.positions
    work.first_positions = tokens.first_positions
    load_tokens(tokens, q, k, sizes)
    work.key_tiles, work.value_tiles = buffers(sizes, work.groups)
    if sizes.paged:
        work.runs = run_numbers(work.block_tables, sizes)
        work.row_tiles = row_tiles(sizes)
    for group in range(min(len(work.groups), sizes.key_buffers)):
        bring_keys(work, group)
        if group < sizes.value_buffers:
            bring_values(work, group, nisa.engine.sync)
    work.queries, work.keys, work.key_rows = transposed_tokens(tokens, sizes, norms)
    heights = []
    for rows in work.key_rows:
        heights.append(rows.shape[0])
    if sizes.paged:
        work.key_places = places_in_pages(work.slots, heights, sizes)
        work.value_places = work.key_places
    else:
        work.key_places = places(positions, sizes.depth * sizes.capacity, heights, sizes)
        work.value_places = places(positions, sizes.capacity, heights, sizes)
    work.value_rows = new_value_rows(work.v, heights, sizes)
    work.keys_at = key_positions(sizes)
    work.causal = causal_among_new(sizes.new, work.window)
    work.sink_logits = None
    if work.sinks is not None:
        work.sink_logits = load_sinks(work)
    work.masked = masked_tiles(sizes)
    if len(work.groups) <= sizes.key_buffers:
        write_keys(work)
    transpose_group(work, 0, 0)
    transpose_group(work, 0, 1)


def bring_keys(work, group):
    """Load the keys of a group; behind the last load the new keys may be written."""
    sizes, box = work.sizes, work.groups[group][0]
    buffer = group % sizes.key_buffers
    if sizes.paged:
        gather(work.row_tiles[buffer], work.k_cache, work.runs, box, sizes)
    else:
        load_keys(work.key_tiles[buffer], work.k_cache, box, sizes)


def bring_values(work, group, engine):
    """Load the values of a group, and of its new tokens."""
    sizes, box = work.sizes, work.groups[group][0]
    cached, new = work.value_tiles[group % sizes.value_buffers]
    if sizes.paged:
        gather(cached, work.v_cache, work.runs, box, sizes)
    else:
        load_values(cached, work.v_cache, box, sizes, engine)
    load_new_values(new, work.v, box, sizes, engine)


def bring_later_keys(work, group):
    """Load keys into the buffer of a group that is done with them; behind the last load the new ones are written."""
    later = group + work.sizes.key_buffers
    if later < len(work.groups):
        bring_keys(work, later)
        if later + 1 == len(work.groups):
            write_keys(work)


def transpose_group(work, group, half):
    """Transpose a half of the keys of a group, if they come from pages; then their rows make room for a later group."""
    sizes = work.sizes
    if not sizes.paged or group >= len(work.groups):
        return
    box = work.groups[group][0]
    rows = by_unit(work.row_tiles[group % sizes.key_buffers], box)
    tile = work.key_tiles[group % sizes.transposed_buffers]
    first, last = sizes.full * half // 2, sizes.full * (half + 1) // 2
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        # Its transposes multiply with zeros, so that one key that is not a number would spoil all of a chunk.
        clear_values(rows, valid_keys(work, box), first, last, sizes)
    transpose_keys(tile, rows, box, first, last, sizes)
    if half == 1:
        bring_later_keys(work, group)


def transpose_next(work, item, half):
    """A half of the transposes of the group after an item's, beside the last item of this one.

    In halves, so that the exponentials, on the engine that copies transposed keys, do not wait for all of them. On gen2
    both follow the exponentials, because Vector, which finds the maximum, would first wait for the keys to clear them.
    """
    if work.begins_group(item + 1):
        following = item // len(work.parts) + 1
        if nisa.get_nc_version() == nisa.nc_version.gen2:
            if half == 1:
                transpose_group(work, following, 0)
                transpose_group(work, following, 1)
        else:
            transpose_group(work, following, half)


def score_keys(work, item):
    """Stage 1: the scores of an item; then its keys make room for a later group."""
    sizes = work.sizes
    group = item // len(work.parts)
    tile = work.key_tiles[group % len(work.key_tiles)]
    scores = score(work.queries, work.keys, tile, work.box(item), work.part(item), sizes)
    work.scores.append(scores)
    if work.begins_group(item + 1) and not sizes.paged:
        bring_later_keys(work, group)


def valid_keys(work, box):
    """1 where a key of a group of units lies before the first new token: [128, units, chunks], uint8."""
    first = first_unit(box, work.sizes)
    return earlier_keys(work.keys_at, work.first_positions[:, first : first + units_in(box)])


def find_largest(work, item):
    """Stage 2: the scores of an item without those that are not valid, and the largest one of each query."""
    sizes, box, part = work.sizes, work.box(item), work.part(item)
    scores = work.scores[item]
    if work.begins_group(item):
        work.valid = valid_keys(work, box)
        work.seen = work.valid.expand_dim(3)
        if work.window is not None:
            first = first_unit(box, sizes)
            firsts = work.first_positions[:, first : first + units_in(box)]
            work.seen = within_window(work.valid, work.keys_at, firsts, sizes.new, work.window)
    seen = work.seen if work.window is None else work.seen[:, :, :, part[0] : part[1]]
    if work.softcap is not None:
        scores = capped(scores, work.factor, sizes)
    work.chosen = work.masked[item % 2][:, 0 : units_in(box), :, 0 : scores.shape[3]]
    select(scores, seen, work.causal[:, part[0] : part[1]], work.chosen, sizes)
    if work.sink_logits is not None:
        add_sinks(work, box, part)
    by_partition = largest_by_partition(work.chosen)
    clear_piece(work, item, 0)
    work.largest = largest_of_queries(by_partition)


def load_sinks(work):
    """Attention sinks as scores, in units of the scale: [1, Hq]."""
    heads = work.sizes.heads
    row = nl.ndarray((1, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=row, src=work.sinks)
    nisa.tensor_scalar(dst=row, data=row, op0=nl.multiply, operand0=1.0 / work.scale)
    return row


def add_sinks(work, box, part):
    """Sinks as keys of the last chunk that have no value, on the first quadrant behind the new keys."""
    sizes = work.sizes
    row, row_end, member, member_end = part
    shape = (1, 1, sizes.kv_heads, 1, sizes.share)
    logits = work.sink_logits.reshape(shape)[:, :, box[2] : box[3], :, member:member_end]
    place = blocks(sizes.new, QUADRANT) * QUADRANT
    nisa.tensor_copy(
        dst=work.chosen[place : place + 1, :, sizes.cached, :],
        src=logits.broadcast(1, box[1] - box[0]).broadcast(3, row_end - row),
    )


def weigh(work, item):
    """Stage 3: the exponentials of an item."""
    largest = on_all_partitions(work.largest)
    work.weights.append(weights_relative_to(work.chosen, largest, work.scale, work.sizes.dtype))
    for piece in range(1, CLEARED_IN):
        clear_piece(work, item, piece)


def clear_piece(work, item, piece):
    """Clear a part of the chunks of a group's values, once for all of its items."""
    sizes = work.sizes
    if work.begins_group(item):
        tile = cached_values(work, item // len(work.parts))
        first, last = sizes.cached * piece // CLEARED_IN, sizes.cached * (piece + 1) // CLEARED_IN
        clear_values(tile, work.valid, first, last, sizes)


def cached_values(work, group):
    """The tile of a group's cached values: [128, unit, chunk, D]."""
    tile = work.value_tiles[group % work.sizes.value_buffers][0]
    return by_unit(tile, work.groups[group][0]) if work.sizes.paged else tile


def add_values(work, item):
    """Stage 4: the weighted values of an item; then they make room for a later group, and a full block is stored."""
    sizes = work.sizes
    group = item // len(work.parts)
    inner, outer = work.groups[group]
    row, row_end, member, member_end = work.part(item)
    if work.block is None:
        work.block = output_block(outer, sizes)
    _, product, sums = work.block
    first = first_unit(inner, sizes, outer[0], outer[2])
    last = first + units_in(inner)
    tiles = cached_values(work, group), work.value_tiles[group % sizes.value_buffers][1]
    add_up_chunks(sums[:, first:last, row:row_end, member:member_end], work.weights[item])
    mix(product[:, :, first:last, row:row_end, member:member_end], tiles, work.weights[item], sizes)
    if work.begins_group(item + 1):
        if group + sizes.value_buffers < len(work.groups):
            bring_values(work, group + sizes.value_buffers, nisa.engine.scalar)
        if inner[1] == outer[1] and inner[3] == outer[3]:
            finish(work.block, work.o, sizes)
            work.block = None


def write_keys(work):
    """Store the new keys, behind the last load of keys in program order: all writes of a cache are one tensor's."""
    if work.sizes.paged:
        scatter(work.k_cache, work.sizes.depth, 1, work.key_rows, work.key_places)
    else:
        scatter(work.k_cache, 1, work.sizes.capacity, work.key_rows, work.key_places)


def write_values(work):
    """Store the new values."""
    scatter(work.v_cache, work.sizes.depth, 1, work.value_rows, work.value_places)

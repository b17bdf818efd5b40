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
    scatter,
)
from nki_kernels.decode.merge import finish_with_other_core, largest_scores
from nki_kernels.decode.output import OutputWeights
from nki_kernels.decode.pages import by_unit, gather, row_tiles, run_numbers, transpose_keys
from nki_kernels.decode.places import new_places
from nki_kernels.decode.products import (
    finish,
    finish_in_place,
    inverse_sums,
    inverse_sums_everywhere,
    mix,
    output_block,
    score,
)
from nki_kernels.decode.ranks import keep_partial, only_on_first_rank, relative_to_rank
from nki_kernels.decode.share import wait_for_other_core
from nki_kernels.decode.sizes import QUADRANT, first_unit, groups_of_blocks, query_parts, units_in
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
from nki_kernels.tiles import PARTITIONS, blocks

CHUNKS_LAST = 8
"""Chunks whose products come behind the sum of the weights, which is inverted meanwhile."""

LOADS_BEFORE_GATHER = 6
"""Groups whose loads are triggered before queries are gathered over ranks, which waits behind them in a full queue."""

CLEARED_IN = 4
"""Pieces in which values are cleared, so that the maximum of a group does not wait for all of them."""


class Work(nl.NKIObject):
    """Tiles and tensors of one launch; item i is the group i // len(parts) with the queries of part i % len(parts)."""

    def __init__(self, sizes, share, ranks, scale, caches, v, o, options):
        self.sizes = sizes
        self.share = share
        self.ranks = ranks
        self.divided = share.merged or ranks is not None
        self.largest_scores = largest_scores(sizes) if self.divided else None
        self.window, self.softcap, self.sinks = options
        self.factor = scale if self.softcap is None else scale / self.softcap
        self.scale = scale if self.softcap is None else self.softcap
        self.k_cache, self.v_cache, self.slots, self.block_tables = caches
        self.v = v
        self.o = o
        self.in_place = o.buffer == nl.sbuf
        self.w_o = None
        self.output = None
        self.groups = groups_of_blocks(sizes)
        self.parts = query_parts(sizes)
        self.items = len(self.groups) * len(self.parts)
        self.scores = []
        self.weights = []
        self.valid = []
        self.cleared = 0
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


def prepare(work, first_positions):
    """Work out which keys are seen, and what depends on nothing."""
    sizes = work.sizes
    work.first_positions = first_positions
    if work.ranks is not None:
        work.first_positions = relative_to_rank(first_positions, work.ranks)
    work.keys_at = key_positions(sizes, work.share.slots[0])
    work.causal = seen_among_new(work)
    work.ones = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=work.ones, value=1.0)
    work.sink_logits = None
    if work.sinks is not None and not work.divided:
        work.sink_logits = load_sinks(work)
    work.masked = masked_tiles(sizes)
    see(work, 0)


def seen_among_new(work):
    """Which new keys the new queries see; of several cores or ranks those of the first attend with them."""
    causal = causal_among_new(work.sizes.new, work.window)
    if work.share.slots[0] > 0:
        nisa.memset(dst=causal, value=0)
    return causal if work.ranks is None else only_on_first_rank(causal, work.ranks)


def place_tokens(work, positions, heights):
    """Find where the new tokens are written: rows (token, kv head), so many of `heights` in each tile."""
    work.key_places, work.value_places = new_places(work, positions, heights)


def bring_first(work):
    """Begin to load the first groups; those behind a gather of queries come with `bring_after_gather`."""
    sizes = work.sizes
    work.key_tiles, work.value_tiles = buffers(sizes, work.groups)
    if sizes.paged:
        work.runs = run_numbers(work.block_tables, sizes)
        work.row_tiles = row_tiles(sizes)
    most = min(len(work.groups), sizes.key_buffers)
    work.brought = most if work.ranks is None else min(most, LOADS_BEFORE_GATHER)
    bring_groups(work, 0, work.brought)


def bring_after_gather(work):
    """Load the first groups that `bring_first` left."""
    most = min(len(work.groups), work.sizes.key_buffers)
    bring_groups(work, work.brought, most)


def bring_groups(work, first, last):
    """Load the keys of groups first … last, and values as there is room for, or behind all keys."""
    sizes = work.sizes
    for group in range(first, last):
        bring_keys(work, group)
        if group < sizes.value_buffers and not sizes.keys_first:
            bring_values(work, group, nisa.engine.sync)
    if sizes.keys_first and last == len(work.groups):
        bring_first_values(work)


def bring_first_values(work):
    """Begin to load the values of the first groups."""
    for group in range(min(len(work.groups), work.sizes.value_buffers)):
        bring_values(work, group, nisa.engine.sync)


def take_tokens(work, queries, keys, key_rows, value_rows):
    """The new tokens, in the layouts of `transposed_tokens` and as rows that the caches take."""
    work.queries, work.keys, work.key_rows, work.value_rows = queries, keys, key_rows, value_rows
    for group in range(min(len(work.groups), work.sizes.value_buffers)):
        bring_new_values(work, group)
    if len(work.groups) <= work.sizes.key_buffers:
        follow_keys(work)
    transpose_group(work, 0, 0)
    transpose_group(work, 0, 1)


def run(work):
    """The pipeline over all groups, once the new tokens are there."""
    behind = 2 if not work.sizes.keys_first else 1 + work.items
    for step in range(work.items + behind):
        if step < work.items:
            score_keys(work, step)
            transpose_next(work, step, 0)
        if 1 <= step <= work.items:
            find_largest(work, step - 1)
        clear_piece(work, step - behind + 1, 0)
        if 1 <= step <= work.items:
            spread_largest(work)
        if step == work.items + 1 and work.sizes.keys_first:
            write_keys(work)
        if step >= behind:
            add_values(work, step - behind)
        if 1 <= step <= work.items:
            weigh(work, step - 1)
        for piece in range(1, CLEARED_IN):
            clear_piece(work, step - behind + 1, piece)
        if step < work.items:
            transpose_next(work, step, 1)
    write_values(work)


def bring_keys(work, group):
    """Load the keys of a group; behind the last load the new keys may be written."""
    sizes, box = work.sizes, work.groups[group][0]
    buffer = group % sizes.key_buffers
    if sizes.paged:
        gather(work.row_tiles[buffer], work.k_cache, work.share.kv_heads[0], work.runs, box, sizes)
    else:
        load_keys(work.key_tiles[buffer], work.share.of_keys(work.k_cache, False), box, sizes)


def bring_values(work, group, engine):
    """Load the values of a group."""
    sizes, box = work.sizes, work.groups[group][0]
    cached = work.value_tiles[group % sizes.value_buffers][0]
    if sizes.paged:
        gather(cached, work.v_cache, work.share.kv_heads[0], work.runs, box, sizes)
    else:
        load_values(cached, work.share.of_values(work.v_cache), box, sizes, engine)


def bring_new_values(work, group):
    """Load the values of the new tokens of a group."""
    new = work.value_tiles[group % work.sizes.value_buffers][1]
    load_new_values(new, work.v, work.groups[group][0], work.sizes)


def bring_later_keys(work, group):
    """Load keys into the buffer of a group that is done with them; behind the last load the new ones are written."""
    sizes = work.sizes
    later = group + sizes.key_buffers
    if later < len(work.groups):
        bring_keys(work, later)
        if later + 1 == len(work.groups):
            if sizes.keys_first:
                bring_first_values(work)
            follow_keys(work)


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


def see(work, item):
    """Which keys of the group of an item its new tokens see."""
    sizes, box = work.sizes, work.box(item)
    valid = valid_keys(work, box)
    work.valid.append(valid)
    work.seen = valid.expand_dim(3)
    if work.window is not None:
        first = first_unit(box, sizes)
        firsts = work.first_positions[:, first : first + units_in(box)]
        work.seen = within_window(valid, work.keys_at, firsts, sizes.new, work.window)


def find_largest(work, item):
    """Stage 2: the scores of an item without those that are not valid, and the largest on each partition."""
    sizes, box, part = work.sizes, work.box(item), work.part(item)
    scores = work.scores[item]
    if work.begins_group(item) and item > 0:
        see(work, item)
    seen = work.seen if work.window is None else work.seen[:, :, :, part[0] : part[1]]
    if work.softcap is not None:
        scores = capped(scores, work.factor, sizes)
    work.chosen = work.masked[item % 2][:, 0 : units_in(box), :, 0 : scores.shape[3]]
    select(scores, seen, work.causal[:, part[0] : part[1]], work.chosen, sizes)
    if work.sink_logits is not None:
        add_sinks(work, box, part)
    work.largest = largest_by_partition(work.chosen)


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


def spread_largest(work):
    """The largest score of each query of all partitions."""
    work.largest = largest_of_queries(work.largest)


def weigh(work, item):
    """Stage 3: the exponentials of an item."""
    largest = on_all_partitions(work.largest)
    if work.divided:
        keep_largest(work, item, largest)
    work.weights.append(weights_relative_to(work.chosen, largest, work.scale, work.sizes.dtype))


def keep_largest(work, item, largest):
    """Keep the largest scores of an item, of which the partitions of `largest` each hold all."""
    box = work.box(item)
    row, row_end, member, member_end = work.part(item)
    first = first_unit(box, work.sizes)
    kept = work.largest_scores[:, first : first + units_in(box), row:row_end, member:member_end]
    nisa.tensor_copy(dst=kept, src=largest[0:1, :].reshape(kept.shape))


def clear_piece(work, item, piece):
    """Clear a part of the chunks of a group's values, once for all of its items, of which the first is next."""
    sizes, group = work.sizes, item // len(work.parts)
    if work.cleared <= group and item < work.items and work.begins_group(item):
        first, last = sizes.cached * piece // CLEARED_IN, sizes.cached * (piece + 1) // CLEARED_IN
        clear_values(cached_values(work, group), work.valid[group], first, last, sizes)


def clear_early(work):
    """Clear the values of the first group at once, where they arrive before its queries."""
    for piece in range(CLEARED_IN):
        clear_piece(work, 0, piece)
    work.cleared = 1


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
    weights = work.weights[item]
    ends = work.begins_group(item + 1) and inner[1] == outer[1] and inner[3] == outer[3]
    add_up_chunks(sums[:, first:last, row:row_end, member:member_end], weights)
    target = product[:, :, first:last, row:row_end, member:member_end]
    middle = max(sizes.chunks // 2, sizes.chunks - CHUNKS_LAST)
    mix(target, tiles, weights, 0, middle, sizes)
    inverse = None
    if ends and work.in_place:
        inverse = inverse_sums_everywhere(work.block, work.ones)
    elif ends and not work.divided:
        inverse = inverse_sums(work.block, work.ones)
    mix(target, tiles, weights, middle, sizes.chunks, sizes)
    later = group + sizes.value_buffers
    if work.begins_group(item + 1) and later < len(work.groups):
        bring_values(work, later, nisa.engine.scalar)
        bring_new_values(work, later)
    if ends:
        finish_block(work, inverse)
        work.block = None


def finish_block(work, inverse):
    """Store the outputs of a full block, or hand on what other cores or ranks add to."""
    if work.share.merged:
        finish_with_other_core(work.block, work.o, work)
    elif work.ranks is not None:
        keep_partial(work.block, work)
    elif work.in_place:
        finish_in_place(work.block, inverse, work.o, work.sizes)
    else:
        finish(work.block, inverse, work.o, work.sizes)


def follow_keys(work):
    """What comes behind the last load of keys: the weights of the output projection, and the new keys' stores.

    With all keys first these stores come when all weights are found: no tile of theirs takes the place of what the
    stores still read.
    """
    if work.w_o is not None:
        work.output = OutputWeights(work.w_o, work.sizes)
    if not work.sizes.keys_first:
        write_keys(work)


def write_keys(work):
    """Store the new keys, behind the last load of keys in program order: all writes of a cache are one tensor's.

    No core writes while the other one still reads: block tables may name any page behind the last position.
    """
    sizes = work.sizes
    row, step = (sizes.depth, 1) if sizes.paged else (1, work.k_cache.shape[3])
    wait_for_other_core(work.share.cores, work.k_cache, nisa.engine.gpsimd)
    scatter(work.k_cache, row, step, work.key_rows, work.key_places, sizes, work.divided)


def write_values(work):
    """Store the new values."""
    sizes = work.sizes
    wait_for_other_core(work.share.cores, work.v_cache, nisa.engine.gpsimd)
    scatter(work.v_cache, sizes.depth, 1, work.value_rows, work.value_places, sizes, work.divided)

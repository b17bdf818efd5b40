"""The stages that an item of decode attention passes through: scores, maximum, weights, weighted values."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.buffers import clear_values
from nki_kernels.decode.loads import bring_later_keys, bring_new_values, bring_values
from nki_kernels.decode.merge import finish_with_other_core, value_scales_of_rows
from nki_kernels.decode.products import (
    finish,
    finish_in_place,
    inverse_sums,
    inverse_sums_everywhere,
    mix,
    output_block,
    score,
)
from nki_kernels.decode.ranks import keep_partial
from nki_kernels.decode.sizes import QUADRANT, first_unit, units_in
from nki_kernels.decode.softmax import (
    add_up_chunks,
    capped,
    largest_by_partition,
    largest_of_queries,
    on_all_partitions,
    select,
    weights_relative_to,
)
from nki_kernels.decode.work import cached_values, see
from nki_kernels.dma import SCALAR
from nki_kernels.tiles import PARTITIONS, blocks

CHUNKS_LAST = 8
"""Chunks whose products come behind the sum of the weights, which is inverted meanwhile."""

CLEARED_IN = 4
"""Pieces in which values are cleared, so that the maximum of a group does not wait for all of them."""

CLEARED_EARLY, CLEARED_EARLY_STORED = 1, 3
"""Of these, pieces that are cleared beside the products of the item before, and the number where keys are stored.

Groups of stored keys are larger, and so are the products of one: with 3 in place of 1 a sequence of 1500 positions and
20 heads of 64 takes 42 us in place of 45 on trn2. With new keys 3 in place of 1 adds up to 2 us.
"""


def score_keys(work, item):
    """Stage 1: the scores of an item; then its keys make room for a later group."""
    sizes = work.sizes
    group = item // len(work.parts)
    tile = work.key_tiles[group % len(work.key_tiles)]
    scores = score(work.queries, work.keys, tile, work.box(item), work.part(item), sizes)
    work.scores.append(scores)
    if work.begins_group(item + 1) and not work.cache.transposes_keys:
        bring_later_keys(work, group)


def find_largest(work, item):
    """Stage 2: mask the scores of an item, and find the largest on each partition."""
    sizes, box, part = work.sizes, work.box(item), work.part(item)
    scores = work.scores[item]
    if work.begins_group(item) and item > 0:
        see(work, item)
    seen = work.seen if work.seen.shape[3] == 1 else work.seen[:, :, :, part[0] : part[1]]
    causal = None if sizes.stored else work.causal[:, part[0] : part[1]]
    if work.softcap is not None:
        scores = capped(scores, work.factor, sizes)
    work.chosen = work.masked[item % 2][:, 0 : units_in(box), :, 0 : scores.shape[3]]
    select(scores, seen, causal, work.chosen, sizes)
    if work.sink_logits is not None:
        add_sinks(work, box, part)
    work.largest = largest_by_partition(work.chosen)


def add_sinks(work, box, part):
    """Sinks as keys of the last chunk that have no value, on the first quadrant behind the new keys, if any."""
    sizes = work.sizes
    row, row_end, member, member_end = part
    shape = (1, 1, sizes.kv_heads, 1, sizes.share)
    logits = work.sink_logits.reshape(shape)[:, :, box[2] : box[3], :, member:member_end]
    place = 0 if sizes.stored else blocks(sizes.new, QUADRANT) * QUADRANT
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
    middle = max(sizes.multiplied // 2, sizes.multiplied - CHUNKS_LAST)
    mix(target, tiles, weights, 0, middle, sizes)
    inverse = None
    if ends and work.in_place:
        inverse = inverse_sums_everywhere(work.block, work.ones)
    elif ends and not work.divided:
        inverse = inverse_sums(work.block, work.ones)
    mix(target, tiles, weights, middle, sizes.multiplied, sizes)
    later = group + sizes.value_buffers
    if work.begins_group(item + 1) and later < len(work.groups):
        bring_values(work, later, SCALAR)
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
        if work.step.scales is not None:
            scale_in_place(inverse, work.step.scales, work.block[0])
        finish_in_place(work.block, inverse, work.o, work.sizes)
    else:
        value_scales = value_scales_of_rows(work.step.scales, work.block[0], work.sizes)
        if value_scales is not None:
            nisa.tensor_tensor(dst=inverse, data1=inverse, data2=value_scales, op=nl.multiply)
        finish(work.block, inverse, work.o, work.sizes)


def scale_in_place(inverse, scales, box):
    """Multiply factors of outputs [128, unit, new token, head] by the scales of their values."""
    heads = box[3] - box[2]
    columns = inverse.shape[2] * inverse.shape[3]
    by_head = inverse.reshape((PARTITIONS, box[1] - box[0], heads, columns))
    factors = scales.values[:, box[2] : box[3]].expand_dim(1).expand_dim(3)
    factors = factors.broadcast(1, box[1] - box[0]).broadcast(3, columns)
    nisa.tensor_tensor(dst=by_head, data1=by_head, data2=factors, op=nl.multiply)

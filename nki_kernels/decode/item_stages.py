"""The stages that an item of decode attention passes through: scores, masked scores, weighted values, outputs.

`decode.pipeline` calls them. A *unit* is one kv head of one sequence. An *item* is a group of units with some of its
queries, by number, see `DecodeLaunch`. A *box* names units: (first sequence, end, first kv head, end). A *query box*
names queries of a kv head: (first new token, end, first query head, end). A *chunk* is 128 keys.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.merge import finish_with_other_core, load_value_scales
from nki_kernels.decode.products import (
    OutputBlock,
    add_weighted_values,
    invert_sums,
    invert_sums_everywhere,
    score,
    store_divided,
    write_divided,
)
from nki_kernels.decode.ranks import keep_partial
from nki_kernels.decode.sizes import QUADRANT, count_units, find_first_unit
from nki_kernels.decode.softmax import add_up_chunks, cap_scores, select
from nki_kernels.tiles import PARTITIONS, blocks

CHUNKS_LAST = 8
"""Chunks whose products with values are issued after the sum of the weights, which is inverted meanwhile."""


def score_keys(launch, loads, item):
    """Return the scores of an item's keys, [128 keys, unit, chunk, query] float32 in PSUM.

    After the last item of a group it begins to load a later group's keys into the buffer, unless keys were transposed
    from it. A unit is one kv head of one sequence; a group is the units that are loaded together; an item is a group
    with some of its queries.

    Args:
        loads: `GroupLoads`, which have the keys in SBUF.
        item: number of the item.
    """
    group = launch.find_group(item)
    tile = loads.key_tiles[group % len(loads.key_tiles)]
    scores = score(loads.rows, tile, launch.find_box(item), launch.find_query_box(item), launch.sizes)
    # Keys that come as rows leave their load buffer when they are transposed, and later loads follow there.
    if launch.is_first_of_group(item + 1) and not launch.cache.transposes_keys:
        loads.load_later_keys(group)
    return scores


def mask_scores(launch, seen_keys, scores, item):
    """Return an item's scores in SBUF, soft-capped if asked, with LOWEST where a query does not see the key.

    The result is a view [128 keys, unit, chunk, query] float32 of one of the two tiles `seen_keys.masked`; the item
    after the next overwrites it. Sinks take part as keys of the last chunk. At the first item of a group the call
    updates `seen_keys` for that group. A unit is one kv head of one sequence; a group is the units that are loaded
    together; an item is a group with some of its queries.

    Args:
        seen_keys: `SeenKeys`.
        scores: what `score_keys` returned for the item.
        item: number of the item.
    """
    sizes, step, box, query_box = (
        launch.sizes,
        launch.step,
        launch.find_box(item),
        launch.find_query_box(item),
    )
    if launch.is_first_of_group(item) and item > 0:
        seen_keys.update_seen(box)
    seen = seen_keys.seen
    if seen.shape[3] > 1:
        seen = seen[:, :, :, query_box[0] : query_box[1]]
    causal = None if sizes.stored else seen_keys.causal[:, query_box[0] : query_box[1]]
    if step.softcap is not None:
        scores = cap_scores(scores, launch.factor, sizes)
    masked = seen_keys.masked[item % 2][:, 0 : count_units(box), :, 0 : scores.shape[3]]
    select(scores, seen, causal, masked, sizes)
    if seen_keys.sink_logits is not None:
        add_sinks(masked, seen_keys.sink_logits, box, query_box, sizes)
    return masked


def add_sinks(masked, sink_logits, box, query_box, sizes):
    """Write attention sinks into the last chunk of `masked`, as scores of one more key, which has no value.

    They go to the first partition that is a multiple of 32 and beyond the new keys. A unit is one kv head of one
    sequence.

    Args:
        masked: masked scores [128 keys, unit, chunk, query] in SBUF.
        sink_logits: [1, Hq] float32 in SBUF.
        box: (first sequence, end, first kv head, end) of the units.
        query_box: (first new token, end, first query head of a kv head, end) of the queries.
    """
    row, row_end, member, member_end = query_box
    shape = (1, 1, sizes.kv_heads, 1, sizes.share)
    logits = sink_logits.reshape(shape)[:, :, box[2] : box[3], :, member:member_end]
    partition = 0 if sizes.stored else blocks(sizes.new, QUADRANT) * QUADRANT
    nisa.tensor_copy(
        dst=masked[partition : partition + 1, :, sizes.cached, :],
        src=logits.broadcast(1, box[1] - box[0]).broadcast(3, row_end - row),
    )


def keep_largest(launch, item, largest):
    """Copy the largest score of each of an item's queries from partition 0 of `largest` to `launch.largest_scores`.

    A unit is one kv head of one sequence; an item is a set of units that are loaded together, with some of their
    queries.

    Args:
        largest: [128, unit * query], the same on every partition.
        item: number of the item.
    """
    box = launch.find_box(item)
    row, row_end, member, member_end = launch.find_query_box(item)
    first = find_first_unit(box, launch.sizes)
    kept = launch.largest_scores[:, first : first + count_units(box), row:row_end, member:member_end]
    nisa.tensor_copy(dst=kept, src=largest[0:1, :].reshape(kept.shape))


def add_values(launch, loads, block, weights, ones, item):
    """Add an item's weighted values, and the sums of its weights, to the accumulators of its output block.

    After the last item of a group it begins to load a later group's values. When the block has all its keys, its
    outputs are written by `finish_block`. A unit is one kv head of one sequence; a group is the units that are loaded
    together; an item is a group with some of its queries.

    Args:
        loads: `GroupLoads`, which have the values in SBUF.
        block: the `OutputBlock` so far, or None to begin one.
        weights: exponentials of the scores, [128 keys, unit, chunk, query] in SBUF; of pages of 4 bits they are
            multiplied in place by the scales of values, once their sums are added.
        ones: [128, 128] float32 of ones in SBUF.
        item: number of the item.

    Returns:
        The block, or None once it is complete and written.
    """
    sizes = launch.sizes
    group = launch.find_group(item)
    inner, outer = launch.groups[group]
    row, row_end, member, member_end = launch.find_query_box(item)
    if block is None:
        block = OutputBlock(outer, sizes)
    first = find_first_unit(inner, sizes, outer[0], outer[2])
    last = first + count_units(inner)
    cached = loads.view_cached_values(group)
    new = None if sizes.stored else loads.new_tiles[group % sizes.value_buffers]
    ends = launch.is_first_of_group(item + 1) and inner[1] == outer[1] and inner[3] == outer[3]
    add_up_chunks(block.sums[:, first:last, row:row_end, member:member_end], weights)
    if sizes.newest > 0:
        launch.cache.scale_weights(weights, sizes, launch.is_first_of_group(item + 1))
    target = block.product[:, :, first:last, row:row_end, member:member_end]
    middle = max(sizes.multiplied // 2, sizes.multiplied - CHUNKS_LAST)
    add_weighted_values(target, cached, new, weights, (0, middle), sizes)
    inverse = None
    if ends and launch.in_place:
        inverse = invert_sums_everywhere(block, ones)
    elif ends and not launch.divided:
        inverse = invert_sums(block, ones)
    add_weighted_values(target, cached, new, weights, (middle, sizes.multiplied), sizes)
    if launch.is_first_of_group(item + 1):
        loads.load_later_values(group)
    if not ends:
        return block
    finish_block(launch, block, inverse, ones)
    return None


def finish_block(launch, block, inverse, ones):
    """Write the outputs of a complete block of queries to `launch.o`, or hand over partial outputs to be merged.

    If two cores divide the positions, they exchange the block, and core 0 writes. If ranks divide them, the block is
    kept in `launch.partials` until `merge_ranks`.

    Args:
        inverse: 1 / sum of weights in SBUF; it is multiplied in place by the values' scales, if any. None for partial
            outputs.
        ones: [128, 128] float32 of ones in SBUF.
    """
    scales = launch.step.scales
    if launch.share.merged:
        finish_with_other_core(launch, block, ones)
    elif launch.ranks is not None:
        keep_partial(launch, block, ones)
    elif launch.in_place:
        if scales is not None:
            scale_in_place(inverse, scales, block.box)
        write_divided(block, inverse, launch.o, launch.sizes)
    else:
        value_scales = load_value_scales(scales, block.box, launch.sizes)
        if value_scales is not None:
            nisa.tensor_tensor(dst=inverse, data1=inverse, data2=value_scales, op=nl.multiply)
        store_divided(block, inverse, launch.o, launch.sizes)


def scale_in_place(inverse, scales, box):
    """Multiply `inverse` [128, unit, new token, head] in SBUF, in place, by the value scale of each unit's kv head.

    A unit is one kv head of one sequence.

    Args:
        scales: `CacheScales`.
        box: (first sequence, end, first kv head, end) of the units.
    """
    heads = box[3] - box[2]
    columns = inverse.shape[2] * inverse.shape[3]
    by_head = inverse.reshape((PARTITIONS, box[1] - box[0], heads, columns))
    factors = scales.values[:, box[2] : box[3]].expand_dim(1).expand_dim(3)
    factors = factors.broadcast(1, box[1] - box[0]).broadcast(3, columns)
    nisa.tensor_tensor(dst=by_head, data1=by_head, data2=factors, op=nl.multiply)

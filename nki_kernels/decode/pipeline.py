"""The software pipeline of decode attention: the order in which the stages of its items are issued.

`decode.attend` and `decode.block` call `run`. A *unit* is one kv head of one sequence. A *group* is a set of units
whose keys are loaded together. An *item* is a group with as many of its queries as are scored at once; items are
numbered group by group.

Each engine works in program order, so the stages of different groups alternate. While the Tensor engine scores one
group, the Vector engine finds the maximum of the one before. The products of a third group with its values hide the
exponentials of that one.
"""

from __future__ import annotations

from nki_kernels.decode.item_stages import (
    add_values,
    keep_largest,
    mask_scores,
    score_keys,
)
from nki_kernels.decode.softmax import (
    compute_weights,
    find_largest_by_partition,
    find_largest_of_queries,
    repeat_on_partitions,
)
from nki_kernels.decode.values import clear_values

CLEARED_IN = 4
"""Pieces in which values are cleared, so that the maximum of a group does not wait for all of them."""

CLEARED_EARLY, CLEARED_EARLY_STORED = 1, 3
"""Pieces of CLEARED_IN that are zeroed before the products of the item before; the second number is for stored keys.

Groups of stored keys are larger, and so are the products of one: with 3 in place of 1 a sequence of 1500 positions
and 20 heads of 64 takes 42 us in place of 45 on trn2. With new keys 3 in place of 1 adds up to 2 us.
"""


def run(launch, loads, seen_keys, cleared):
    """Issue all stages of all items, from scores to outputs in `launch.o` or partial outputs, and store the new values.

    The caller has loaded the new tokens and the first groups. An item's keys are scored while the item before finds
    its maximum. Its values are multiplied two steps after its scores, or with `sizes.keys_first` after the scores of
    all items. Loads of later groups follow the last use of their buffers. A group is the (sequence, kv head) pairs
    that are loaded together; an item is a group with some of its queries.

    Args:
        launch: `DecodeLaunch`.
        loads: its `GroupLoads`, which have taken the new tokens.
        seen_keys: its `SeenKeys`, at the first group.
        cleared: number of first groups whose unseen values are zeroed already.
    """
    sizes, items = launch.sizes, launch.items
    behind = 2 if not sizes.keys_first else 1 + items
    early = CLEARED_EARLY_STORED if sizes.stored else CLEARED_EARLY
    if sizes.value_buffers == 1 and len(launch.groups) > 1:
        # The only tile has the values of the item before until these are multiplied.
        early = 0
    scores, weights = [], []
    block = None
    for step in range(items + behind):
        masks = 1 <= step <= items
        item = step - behind
        if step < items:
            scores.append(score_keys(launch, loads, step))
            loads.transpose_next(step, 0)
        if masks:
            masked = mask_scores(launch, seen_keys, scores[step - 1], step - 1)
            largest = find_largest_by_partition(masked)
        if early > 0 and launch.find_group(item + 1) >= cleared:
            clear_pieces(launch, loads, seen_keys, item + 1, (0, early))
        if masks:
            largest = find_largest_of_queries(largest)
        # All weights are found by now, and GpSimd addresses the new keys while the values are loaded.
        if step == items + 1 and sizes.keys_first:
            loads.store_keys()
        if item + 1 == items and loads.output_weights is not None:
            # The Vector engine has time before the last products with values end.
            loads.output_weights.unpack()
        if item >= 0:
            block = add_values(launch, loads, block, weights[item], seen_keys.ones, item)
        if masks:
            # Products of another item keep the Tensor engine busy until the Vector engine has the maximum.
            largest = repeat_on_partitions(largest)
            if launch.divided:
                keep_largest(launch, step - 1, largest)
            weights.append(compute_weights(masked, largest, launch.scale, sizes.dtype))
        if launch.find_group(item + 1) >= cleared:
            clear_pieces(launch, loads, seen_keys, item + 1, (early, CLEARED_IN))
        if step < items:
            loads.transpose_next(step, 1)
    # New values are written behind the last load of cached values, so no load waits for the write.
    if not sizes.stored:
        loads.store_values()


def clear_pieces(launch, loads, seen_keys, item, pieces):
    """Zero a group's cached values in SBUF where no new token sees the key, in some of CLEARED_IN pieces of its chunks.

    Full pages of 4 bits are unpacked with the first piece instead; only the newest pages have values to clear then.
    Does nothing unless `item` is the first item of its group, nor beyond the last item. A group is the (sequence, kv
    head) pairs that are loaded together; a chunk is 128 positions; an item is a group with some of its queries.

    Args:
        item: number of an item.
        pieces: (first, end) of the pieces, 0 … CLEARED_IN.
    """
    group, sizes = launch.find_group(item), launch.sizes
    if item < launch.items and launch.is_first_of_group(item):
        if sizes.newest > 0:
            if pieces[0] == 0:
                loads.unpack_values(group)
                clear_values(
                    loads.view_cached_values(group), seen_keys.valid[group], sizes.full, sizes.cached, sizes
                )
            return
        for piece in range(pieces[0], pieces[1]):
            first, last = sizes.cached * piece // CLEARED_IN, sizes.cached * (piece + 1) // CLEARED_IN
            clear_values(loads.view_cached_values(group), seen_keys.valid[group], first, last, sizes)

"""The software pipeline of decode attention: the order in which the stages of its items are issued.

Each engine works in program order, so the stages of different groups alternate: while the Tensor engine scores one
group, the Vector engine finds the maximum of the one before, whose exponentials the product of a third one hides. Work
that has queries for several passes over a loaded group takes one item of the pipeline for each.
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
"""Of these, pieces that are cleared beside the products of the item before, and the number where keys are stored.

Groups of stored keys are larger, and so are the products of one: with 3 in place of 1 a sequence of 1500 positions and
20 heads of 64 takes 42 us in place of 45 on trn2. With new keys 3 in place of 1 adds up to 2 us.
"""


def run(launch, loads, seen_keys, cleared):
    """Issue all stages of all items, once the new tokens are there; values of `cleared` groups are clear.

    An item's keys are scored while the item before finds its maximum; its values are multiplied two steps after its
    scores, or behind all keys. The loads of later groups follow the last use of their buffers.
    """
    sizes, items = launch.sizes, launch.items
    behind = 2 if not sizes.keys_first else 1 + items
    early = CLEARED_EARLY_STORED if sizes.stored else CLEARED_EARLY
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
        if launch.find_group(item + 1) >= cleared:
            clear_pieces(launch, loads, seen_keys, item + 1, (0, early))
        if masks:
            largest = find_largest_of_queries(largest)
        # All weights are found by now, and GpSimd addresses the new keys while the values are loaded.
        if step == items + 1 and sizes.keys_first:
            loads.store_keys()
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
    """Clear a range of pieces of the values of a group, once for all of its items: `item` is the first one."""
    group, sizes = launch.find_group(item), launch.sizes
    if item < launch.items and launch.is_first_of_group(item):
        for piece in range(pieces[0], pieces[1]):
            first, last = sizes.cached * piece // CLEARED_IN, sizes.cached * (piece + 1) // CLEARED_IN
            clear_values(loads.view_cached_values(group), seen_keys.valid[group], first, last, sizes)

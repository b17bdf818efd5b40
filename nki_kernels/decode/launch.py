"""One launch of decode attention on one core: its sizes, arguments and groups, and masks of the keys that tokens see.

`decode.attend` and `decode.block` make a `DecodeLaunch` and a `SeenKeys`; the stages of the pipeline read them.

A *unit* is one kv head of one sequence. A *box* of units is (first sequence, end, first kv head, end). A *group* is a
box whose keys are loaded together; a *block* is a box whose outputs are accumulated together. A *chunk* is 128 keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.ranks import allocate_partial_outputs, subtract_rank, zero_on_other_ranks
from nki_kernels.decode.sizes import count_units, find_first_unit, list_groups, list_query_boxes
from nki_kernels.decode.softmax import (
    create_masked_tiles,
    generate_key_positions,
    mark_causal_keys,
    mark_earlier_keys,
    mark_keys_in_window,
    mark_keys_of_pages,
    mark_keys_up_to_tokens,
)
from nki_kernels.tiles import PARTITIONS, filled


class DecodeLaunch(nl.NKIObject):
    """Sizes, arguments, groups and outputs `o` of one launch on one core.

    `groups` are pairs (box of the group, box of its block). An *item* is one group with one box of its queries; items
    are numbered group by group. `divided`: whether the outputs of cores or ranks are merged; then `largest_scores`
    [1, unit, new token, head] float32 in SBUF keeps the maxima. `partials`: partial outputs of ranks in HBM, or None.
    `in_place`: whether o is in SBUF. `factor` is what scores are multiplied by before tanh, and `scale` before exp.
    """

    def __init__(self, sizes, share, ranks, cache, o, step):
        self.sizes, self.share, self.ranks, self.cache, self.o, self.step = (
            sizes,
            share,
            ranks,
            cache,
            o,
            step,
        )
        self.divided = share.merged or ranks is not None
        self.largest_scores = None
        if self.divided:
            shape = (1, sizes.sequences * sizes.kv_heads, sizes.new, sizes.share)
            self.largest_scores = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.partials = None if ranks is None else allocate_partial_outputs(ranks, sizes)
        self.factor = step.scale if step.softcap is None else step.scale / step.softcap
        self.scale = step.scale if step.softcap is None else step.softcap
        self.in_place = o.buffer == nl.sbuf
        self.groups = list_groups(sizes)
        self.query_boxes = list_query_boxes(sizes)
        self.items = len(self.groups) * len(self.query_boxes)

    def find_group(self, item):
        """Return the index in `groups` of the group of item number `item`.

        A group is the (sequence, kv head) pairs that are loaded together; an item is a group with some of its
        queries.
        """
        return item // len(self.query_boxes)

    def find_box(self, item):
        """Return the units of item number `item` as a box: (first sequence, end, first kv head, end).

        A unit is one kv head of one sequence; an item is a set of units that are loaded together, with some of their
        queries.
        """
        return self.groups[self.find_group(item)][0]

    def find_query_box(self, item):
        """Return which queries of each unit an item has: (first new token, end, first query head of a kv head, end).

        A unit is one kv head of one sequence; an item is a set of units that are loaded together, with some of their
        queries.
        """
        return self.query_boxes[item % len(self.query_boxes)]

    def is_first_of_group(self, item):
        """Return whether item number `item` is the first one of its group; True also for the number after the last.

        A group is the (sequence, kv head) pairs that are loaded together; an item is a group with some of its
        queries.
        """
        return item % len(self.query_boxes) == 0


@dataclass
class TokenRows(nl.NKIObject):
    """New tokens: queries and keys [D in tile, tile, token, head] in SBUF, values, and rows for the caches.

    v: values [T, Hk * D], in HBM or SBUF. key_rows, value_rows: lists of SBUF tiles [height, D], whose rows are
    numbered token * Hk + head. key_addresses, value_addresses: for each tile the rows' addresses in the caches,
    [height, 1] int32 in SBUF. If the caches hold the new keys already, all but the queries are None or empty.
    """

    queries: nl.NkiTensor
    keys: object
    v: object
    key_rows: object
    value_rows: object
    key_addresses: object
    value_addresses: object


class SeenKeys(nl.NKIObject):
    """Masks of the keys that the new tokens see, and the tiles that the softmax needs besides the scores, all in SBUF.

    `seen`: 1 where the new tokens see a cached key of the current group, [128, unit, chunk, 1 or new token] uint8.
    `valid`: for each group so far, 1 where any new token sees the key without a window. `causal`: the same among new
    keys, see `mark_seen_new_keys`. `masked`: two tiles for masked scores. `sink_logits`: [1, Hq] or None.

    Args:
        first_positions: position of each sequence's first new token for each kv head, [128, B * Hk] float32 in SBUF.
    """

    def __init__(self, launch, first_positions):
        self.launch = launch
        sizes, ranks = launch.sizes, launch.ranks
        self.first_positions = first_positions if ranks is None else subtract_rank(first_positions, ranks)
        self.key_positions = generate_key_positions(sizes, launch.share.slots[0])
        self.causal = mark_seen_new_keys(launch)
        self.ones = filled((PARTITIONS, PARTITIONS), 1.0)
        self.sink_logits = None
        # Divided outputs take their sinks when they are merged, because each part would count them otherwise.
        if launch.step.sinks is not None and not launch.divided:
            self.sink_logits = load_sinks(launch)
        self.masked = create_masked_tiles(sizes)
        self.seen = None
        self.valid = []
        self.update_seen(launch.find_box(0))

    def select_first_positions(self, box):
        """Return a view [128, unit] of the positions of the first new tokens, for the units of a box.

        With ranks that divide positions they are less this rank's index. A unit is one kv head of one sequence.

        Args:
            box: (first sequence, end, first kv head, end).
        """
        first = find_first_unit(box, self.launch.sizes)
        return self.first_positions[:, first : first + count_units(box)]

    def mark_seen_keys(self, box):
        """Return 1 where the new tokens of a box see a cached key, windows ignored, else 0.

        The mask is [128, unit, chunk, 1 or new token] uint8 in SBUF. Keys before the first new token are seen by all,
        so that one column serves all new tokens. If the caches hold the new keys already, each token has a column,
        with the keys up to its own position. A unit is one kv head of one sequence; a chunk is 128 positions.

        Args:
            box: (first sequence, end, first kv head, end) of the units.
        """
        if self.launch.sizes.stored:
            return mark_keys_up_to_tokens(
                self.key_positions, self.select_first_positions(box), self.launch.sizes.new
            )
        firsts = self.select_first_positions(box)
        if self.launch.sizes.newest > 0:
            return mark_keys_of_pages(self.key_positions, firsts, self.launch.sizes).expand_dim(3)
        return mark_earlier_keys(self.key_positions, firsts).expand_dim(3)

    def update_seen(self, box):
        """Set `seen` to the mask of a group's cached keys, within the window if any, and append the group to `valid`.

        A group is the (sequence, kv head) pairs that are loaded together.

        Args:
            box: (first sequence, end, first kv head, end) of the group.
        """
        window = self.launch.step.window
        self.seen = self.mark_seen_keys(box)
        self.valid.append(select_valid_keys(self.seen))
        if window is not None:
            firsts, new = self.select_first_positions(box), self.launch.sizes.new
            self.seen = mark_keys_in_window(self.seen, self.key_positions, firsts, new, window)


def mark_seen_new_keys(launch):
    """Return 1 where a new query sees a new key, [new key, new query] uint8 in SBUF; None if the caches hold them.

    It is 0 everywhere on a core or rank other than the first of those that divide positions: the first one attends to
    the new keys.
    """
    if launch.sizes.stored:
        return None
    new = launch.sizes.new
    if launch.share.slots[0] > 0:
        causal = filled((new, new), 0, nl.uint8)
    else:
        causal = mark_causal_keys(new, launch.step.window)
    return causal if launch.ranks is None else zero_on_other_ranks(causal, launch.ranks)


def select_valid_keys(seen):
    """Return the last new token's column of a mask of `SeenKeys.mark_seen_keys`, a view [128, unit, chunk].

    The last new token sees every key that some new token sees. A unit is one kv head of one sequence; a chunk is 128
    positions.
    """
    return seen[:, :, :, seen.shape[3] - 1]


def load_sinks(launch):
    """Load the attention sinks into SBUF, divided by `launch.scale` to compare with scores: [1, Hq] float32."""
    row = nl.ndarray((1, launch.sizes.heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=row, src=launch.step.sinks)
    nisa.tensor_scalar(dst=row, data=row, op0=nl.multiply, operand0=1.0 / launch.scale)
    return row

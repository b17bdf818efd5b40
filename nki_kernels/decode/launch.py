"""What one launch of decode attention holds, and which cached and new keys its tokens see."""

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
    mark_keys_up_to_tokens,
)
from nki_kernels.tiles import PARTITIONS, filled


class DecodeLaunch(nl.NKIObject):
    """Sizes, arguments and groups of one launch on one core; `divided`: outputs of cores or ranks are merged.

    An item is the group item // len(query_boxes) with the queries of box item % len(query_boxes). `factor` is what
    scores are multiplied by before tanh, and `scale` before exp.
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
        """Return the group of an item."""
        return item // len(self.query_boxes)

    def find_box(self, item):
        """Return the sequences and kv heads of an item."""
        return self.groups[self.find_group(item)][0]

    def find_query_box(self, item):
        """Return the queries of an item."""
        return self.query_boxes[item % len(self.query_boxes)]

    def is_first_of_group(self, item):
        """Return whether an item is the first one of its group."""
        return item % len(self.query_boxes) == 0


@dataclass
class TokenRows(nl.NKIObject):
    """The new tokens: queries and keys [D in tile, tile, token, head], values v [T, Hk * D], and rows for the caches.

    key_rows, value_rows: tiles [height, D] of rows (token, kv head), with their addresses in the caches. Without new
    keys all but the queries are None or empty.
    """

    queries: nl.NkiTensor
    keys: object
    v: object
    key_rows: object
    value_rows: object
    key_addresses: object
    value_addresses: object


class SeenKeys(nl.NKIObject):
    """Which keys the new tokens see, and the tiles that the softmax takes beside the scores.

    `seen`: 1 where the new tokens see a cached key of the group at hand. `valid`: for each group, where any of them
    does.
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
        """Return the positions of the first new tokens of a group of units: [128, units]."""
        first = find_first_unit(box, self.launch.sizes)
        return self.first_positions[:, first : first + count_units(box)]

    def mark_seen_keys(self, box):
        """Return 1 where the new tokens see a cached key of a group: [128, units, chunks, 1 or new token], uint8.

        Those before the first new token, the same for all; where the caches hold new keys, those up to each token.
        """
        if self.launch.sizes.stored:
            return mark_keys_up_to_tokens(
                self.key_positions, self.select_first_positions(box), self.launch.sizes.new
            )
        return mark_earlier_keys(self.key_positions, self.select_first_positions(box)).expand_dim(3)

    def update_seen(self, box):
        """Find which keys of the next group its new tokens see."""
        window = self.launch.step.window
        self.seen = self.mark_seen_keys(box)
        self.valid.append(select_valid_keys(self.seen))
        if window is not None:
            firsts, new = self.select_first_positions(box), self.launch.sizes.new
            self.seen = mark_keys_in_window(self.seen, self.key_positions, firsts, new, window)


def mark_seen_new_keys(launch):
    """Return which new keys the new queries see, or None without new keys.

    Of several cores or ranks those of the first attend with them.
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
    """Return 1 where some new token sees a cached key, of what `seen_keys` returns: [128, units, chunks]."""
    return seen[:, :, :, seen.shape[3] - 1]


def load_sinks(launch):
    """Load attention sinks as scores, in units of the scale: [1, Hq]."""
    row = nl.ndarray((1, launch.sizes.heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=row, src=launch.step.sinks)
    nisa.tensor_scalar(dst=row, data=row, op0=nl.multiply, operand0=1.0 / launch.scale)
    return row

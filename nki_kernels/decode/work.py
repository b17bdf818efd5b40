"""What one launch of decode attention holds, and what is worked out before its pipeline begins."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.merge import largest_scores
from nki_kernels.decode.ranks import only_on_first_rank, relative_to_rank
from nki_kernels.decode.sizes import first_unit, groups_of_blocks, query_parts, units_in
from nki_kernels.decode.softmax import (
    causal_among_new,
    earlier_keys,
    key_positions,
    masked_tiles,
    up_to_each,
    within_window,
)
from nki_kernels.tiles import PARTITIONS


class Work(nl.NKIObject):
    """Tiles and tensors of one launch; item i is the group i // len(parts) with the queries of part i % len(parts)."""

    def __init__(self, sizes, share, ranks, cache, v, o, step):
        self.sizes = sizes
        self.share = share
        self.ranks = ranks
        self.divided = share.merged or ranks is not None
        self.largest_scores = largest_scores(sizes) if self.divided else None
        self.window, self.softcap, self.sinks = step.window, step.softcap, step.sinks
        self.factor = step.scale if self.softcap is None else step.scale / self.softcap
        self.scale = step.scale if self.softcap is None else self.softcap
        self.step = step
        self.cache = cache
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
    """Which new keys the new queries see; of several cores or ranks those of the first attend with them. None: no new
    keys.
    """
    if work.sizes.stored:
        return None
    new = work.sizes.new
    if work.share.slots[0] > 0:
        causal = nl.ndarray((new, new), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.memset(dst=causal, value=0)
    else:
        causal = causal_among_new(new, work.window)
    return causal if work.ranks is None else only_on_first_rank(causal, work.ranks)


def place_tokens(work, heights):
    """Find where the new tokens are written: rows (token, kv head), so many of `heights` in each tile."""
    work.key_addresses, work.value_addresses = work.cache.new_addresses(work, work.step.positions, heights)


def seen_keys(work, box):
    """1 where the new tokens see a cached key of a group of units: [128, units, chunks, 1 or new token], uint8.

    Those before the first new token, the same for all; where the caches hold new keys, those up to each token.
    """
    first = first_unit(box, work.sizes)
    firsts = work.first_positions[:, first : first + units_in(box)]
    if work.sizes.stored:
        return up_to_each(work.keys_at, firsts, work.sizes.new)
    return earlier_keys(work.keys_at, firsts).expand_dim(3)


def valid_keys(seen):
    """1 where some new token sees a cached key, of what `seen_keys` gives: [128, units, chunks]."""
    return seen[:, :, :, seen.shape[3] - 1]


def see(work, item):
    """Which keys of the group of an item its new tokens see."""
    sizes, box = work.sizes, work.box(item)
    work.seen = seen_keys(work, box)
    work.valid.append(valid_keys(work.seen))
    if work.window is not None:
        first = first_unit(box, sizes)
        firsts = work.first_positions[:, first : first + units_in(box)]
        work.seen = within_window(work.seen, work.keys_at, firsts, sizes.new, work.window)


def load_sinks(work):
    """Attention sinks as scores, in units of the scale: [1, Hq]."""
    heads = work.sizes.heads
    row = nl.ndarray((1, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=row, src=work.sinks)
    nisa.tensor_scalar(dst=row, data=row, op0=nl.multiply, operand0=1.0 / work.scale)
    return row


def cached_values(work, group):
    """The tile of a group's cached values: [128, unit, chunk, D]."""
    tile = work.value_tiles[group % work.sizes.value_buffers][0]
    return work.cache.by_unit(tile, work.groups[group][0])

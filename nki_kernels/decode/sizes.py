"""Sizes of a decode step: tile sizes, buffers, and which kv heads of which sequences are processed together.

The decode kernels make a `Sizes`; each stage of `decode` reads it.

A *unit* is one kv head of one sequence. A *group* of units is loaded by one DMA and shares the instructions of the
softmax; a *block* of units shares an output tile, whose rows are queries. Both are boxes of sequences by kv heads:
(first sequence, end, first kv head, end).
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.cache.scales import choose_cache_operand, count_bytes
from nki_kernels.tiles import BANK, PARTITIONS, blocks

QUADRANT = 32
"""Partitions at whose multiples a tile of few partitions begins."""

LOAD_BYTES = 8192
"""Bytes per partition that one DMA loads at least, if short caches need several units for that: 1 MiB in all."""

MANY_BYTES = 65536
"""Bytes per partition of all keys from which on LOAD_BYTES is halved: with many groups, small ones overlap better."""

STORED_COLUMNS = 84
"""Columns of scores for which groups of stored keys grow beyond LOAD_BYTES: no new key waits for the last load, and the
softmax takes as many instructions for a few columns. Sequences of 1500 positions and 20 heads of 64 on trn2, in program
order and scheduled: 4 of them take 134 and 103 us, with 60 columns 137 and 104, with 104 columns 133 and 119."""

STORED_BYTES = 24576
"""Bytes per partition up to which groups of stored keys grow."""

BUFFER_BYTES = 131072
"""Bytes per partition of all loaded keys and values."""

VALUE_BUFFERS = 2
"""Groups whose values are in SBUF at most where there are new keys. Cached keys take the remaining buffers.

The new keys are written when all cached ones have been read, and GpSimd takes long to address them.
"""

KEYS_FIRST_POSITIONS = 2048
"""Positions up to which all keys are loaded, and their weights computed, before the values.

The new keys are written when all cached ones have been read. GpSimd takes longer to address a new key than the loads
of the values of a unit take.
"""

WEIGHT_BYTES = 16384
"""Bytes per partition that the softmax weights of all units may take if all keys are loaded first."""

VALUE_PART_OVER_RANKS = 4
"""One of so many buffers is for values where ranks divide positions: values arrive while queries are gathered."""

SCORE_BANKS = 2
"""PSUM banks of the scores of one group; the scores of the next group take as many other banks."""


@dataclass
class Buffers(nl.NKIObject):
    """Numbers of groups that have buffers: for loaded keys, for values, and for keys as the score product takes them.

    keys_first: whether all keys are loaded before the values.
    """

    keys: int
    values: int
    scored: int
    keys_first: bool


class Sizes(nl.NKIObject):
    """Dimensions of one core's share of a launch, and the tile sizes that follow from them.

    `ranks` divide the positions of a cache: `local_heads` of all `heads` are this rank's. `stored`: the caches hold
    the keys and values of the new tokens already, so none are new. `new`: new tokens of a sequence. `share`: query
    heads of a kv head. `queries`: new * share. `newest`: positions of a sequence's newest page, if it is a chunk of its
    own, else 0. `full`: whole chunks of 128 cached positions; `remaining`: positions after these, or of the newest
    page. `cached`: chunks of cached keys; `chunks`: those and one of new keys. `units`: units of a group.
    `width`: most queries of a unit that are scored together. `together`: heads that fit side by side on the
    partitions; `joined`: the largest number of these that divides `share`. `operand`: dtype in which products take
    cached keys and values.

    Args:
        tokens: number of new tokens, T.
        width: columns of the queries, local query heads * D.
        cache: the cache of the share.
    """

    def __init__(self, tokens, width, dtype, cache, ranks=1, stored=False):
        self.sequences, self.kv_heads = cache.sequences, cache.kv_heads
        self.depth, self.capacity = cache.depth, cache.capacity
        self.slots_together = cache.slots_together
        self.keeps_heads_together = cache.keeps_heads_together
        self.tokens = tokens
        self.ranks = ranks
        self.local_heads = width // self.depth
        self.heads = ranks * self.local_heads
        self.dtype = dtype
        self.operand = choose_cache_operand(cache.k_cache.dtype, dtype)
        self.new = self.tokens // self.sequences
        self.share = self.heads // self.kv_heads
        self.queries = self.new * self.share
        self.depth_tiles = blocks(self.depth)
        # Heads that share the partitions of a product: a tile of few partitions begins at a quadrant.
        self.together = PARTITIONS // self.depth if self.depth in (QUADRANT, 2 * QUADRANT) else 1
        self.joined = self.together
        while self.share % self.joined > 0:
            self.joined = self.joined // 2
        self.newest = cache.newest_positions
        self.full = (self.capacity - self.newest) // PARTITIONS
        self.remaining = self.capacity - self.full * PARTITIONS
        self.cached = self.full + (1 if self.remaining > 0 else 0)
        self.stored = stored
        self.chunks = self.cached + 1
        self.multiplied = self.cached if stored else self.chunks
        # Chunks of a power of two queries do not straddle PSUM banks.
        self.width = 1
        while self.width < self.queries and 2 * self.width * self.chunks <= SCORE_BANKS * BANK:
            self.width = 2 * self.width
        position_bytes = self.depth_tiles * count_bytes(self.operand)
        unit_bytes = self.capacity * position_bytes
        self.most_positions = BUFFER_BYTES // (cache.tiles_per_position * position_bytes)
        # `find_largest_of_queries` puts units times queries on the partitions, and the scores have SCORE_BANKS banks.
        room = min(PARTITIONS // self.width, SCORE_BANKS * BANK // (self.width * self.chunks))
        all_units = self.sequences * self.kv_heads
        self.cache_bytes = 2 * all_units * unit_bytes
        load_bytes = LOAD_BYTES // 2 if all_units * unit_bytes >= MANY_BYTES else LOAD_BYTES
        if count_bytes(self.operand) == 1:
            # As many positions as of bfloat16: the instructions of a group take as long.
            load_bytes = 2 * load_bytes
        self.units = cache.choose_group_units(self, room, unit_bytes, load_bytes // unit_bytes)
        # In the time in which GpSimd addresses a new key, so many cached ones are loaded.
        weight_bytes = all_units * self.chunks * self.queries * (4 if dtype == nl.float32 else 2)
        short = self.capacity <= KEYS_FIRST_POSITIONS and weight_bytes <= WEIGHT_BYTES
        buffers = cache.divide_buffers(self, BUFFER_BYTES // (self.units * unit_bytes), short)
        self.key_buffers, self.value_buffers = buffers.keys, buffers.values
        self.scored_buffers, self.keys_first = buffers.scored, buffers.keys_first


def divide_into_boxes(sequences, kv_heads, most):
    """Return boxes (first sequence, end, first kv head, end) that cover all units, each with at most `most` units.

    A box has whole sequences if `most` allows one, else some kv heads of one sequence. Boxes are ordered by sequence,
    then by kv head. A unit is one kv head of one sequence.
    """
    result = []
    together = max(1, most // kv_heads)
    heads_together = min(kv_heads, most)
    for first in range(0, sequences, together):
        for head in range(0, kv_heads, heads_together):
            box = (first, min(sequences, first + together), head, min(kv_heads, head + heads_together))
            result.append(box)
    return result


def list_groups(sizes):
    """Return the groups of units in the order of their loads, as pairs (box of the group, box of its block).

    A box is (first sequence, end, first kv head, end). Groups have at most `sizes.units` units; the queries of a
    block fill at most 128 rows. A unit is one kv head of one sequence; a group is the units that are loaded together.
    """
    result = []
    for outer in divide_into_boxes(sizes.sequences, sizes.kv_heads, PARTITIONS // sizes.queries):
        for inner in divide_into_boxes(outer[1] - outer[0], outer[3] - outer[2], sizes.units):
            box = (outer[0] + inner[0], outer[0] + inner[1], outer[2] + inner[2], outer[2] + inner[3])
            result.append((box, outer))
    return result


def list_query_boxes(sizes):
    """Return boxes (first new token, end, first query head, end) that cover the queries of a unit, in order.

    Query heads are counted from the first one of the kv head. A box has at most `sizes.width` queries, which are
    scored together. A unit is one kv head of one sequence.
    """
    return divide_into_boxes(sizes.new, sizes.share, sizes.width)


def count_units(box):
    """Return the number of units, pairs of a sequence and a kv head, in a box.

    Args:
        box: (first sequence, end, first kv head, end).
    """
    return (box[1] - box[0]) * (box[3] - box[2])


def locate_unit(box, number):
    """Return the sequence and the kv head of unit number `number` of a box; kv heads count faster than sequences.

    A unit is one kv head of one sequence.

    Args:
        box: (first sequence, end, first kv head, end).
    """
    heads = box[3] - box[2]
    return box[0] + number // heads, box[2] + number % heads


def find_first_unit(box, sizes, sequence=0, kv_head=0):
    """Return the number of a box's first unit, counted from the unit of `sequence` and `kv_head`.

    Units are numbered sequence * `sizes.kv_heads` + kv head. A unit is one kv head of one sequence.

    Args:
        box: (first sequence, end, first kv head, end).
    """
    return (box[0] - sequence) * sizes.kv_heads + box[2] - kv_head

"""What attention_prefill computes, in pieces: the sizes of a launch, its tiles of queries and their spans of keys."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.prefill_masks import Masks, first_key, mask_of
from nki_kernels.tiles import PARTITIONS, blocks


class Tuning(nl.NKIObject):
    """Sizes and distances of the pipeline, all in keys; the largest sizes fit into the SBUF of every chip."""

    def __init__(self, dtype, wide):
        narrow = dtype == nl.bfloat16
        self.span = 8192 if narrow and wide else 4096
        self.scores = 1024
        self.exponents = 2048 if narrow else 1024
        self.recomputed = 1024
        self.recomputed_share = (2, 9) if narrow else (0, 1)
        self.exponents_after = 3000 if narrow else 1500
        self.recompute_after = 4500
        self.by_key_after = 6000
        self.multiply_after = 12000 if narrow else 6000
        self.finish_after = 3000
        self.store_after = 4096
        self.cache_after = 16384
        self.queries_ahead = 4


HEAD_BYTES = 49152
"""Keys and values of one head, in bytes per partition, beside which those of the next head still fit."""


class Case(nl.NKIObject):
    """The sizes of a launch, and tiles that all of its steps use."""

    def __init__(self, q, k, k_cache, v_cache, scale, causal, window):
        self.sequences = k_cache.shape[0]
        self.kv_heads = k_cache.shape[1]
        self.depth = k_cache.shape[2]
        self.group = q.shape[1] // (self.kv_heads * self.depth)
        self.queries = q.shape[0] // self.sequences
        self.new_keys = k.shape[0] // self.sequences
        self.prefix = 0
        self.keys = self.prefix + self.new_keys
        self.parts = blocks(self.depth)
        self.part_depth = self.depth // self.parts
        self.dtype = q.dtype
        self.scale = scale
        self.masks = Masks(q.dtype, causal, window)
        self.tuning = Tuning(q.dtype, nisa.get_nc_version() > nisa.nc_version.gen2)
        self.two_heads_fit = head_bytes(self) <= HEAD_BYTES
        self.minus_one = column(-1.0)
        self.minus_scale = column(-scale)
        self.k_cache = k_cache
        self.v_cache = v_cache
        self.o = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)


def head_bytes(case):
    """Bytes per partition of the keys and values of one head."""
    size = 2 if case.dtype == nl.bfloat16 else 4
    return blocks(case.keys) * (case.parts * PARTITIONS + case.depth + 1) * size


def column(value):
    """A tile [128, 1] of one float32 value."""
    tile = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


class Queries(nl.NKIObject):
    """Up to 128 queries of a sequence, of all heads that share a key/value head; `tile` once they are loaded."""

    def __init__(self, sequence, head, first, count):
        self.sequence = sequence
        self.head = head
        self.first = first
        self.count = count
        self.tile = None


class Span(nl.NKIObject):
    """Rows (queries of some heads), a range of keys, and what the steps hand on; `before` is the rows' span before."""

    def __init__(self, queries, first_head, heads, start, end, recomputed, before, last):
        self.queries = queries
        self.first_head = first_head
        self.heads = heads
        self.rows = heads * queries.count
        self.start = start
        self.end = end
        self.recomputed = recomputed
        self.before = before
        self.last = last
        self.head = None
        self.scores = None
        self.maximum = None
        self.bias = None
        self.shift = None
        self.scores_by_key = {}
        self.weights = {}
        self.product = None
        self.multiplied = False
        self.sums = None
        self.result = None


def all_queries(case):
    """The queries of a launch, in the order of their work.

    The last queries of a sequence see most keys, the first ones few. They take turns: alone, the few keys of the first
    ones would not fill the pipeline.
    """
    result = []
    count = blocks(case.queries)
    for sequence in range(case.sequences):
        for head in range(case.kv_heads):
            for i in range(count):
                block = i // 2 if i % 2 > 0 else count - 1 - i // 2
                first = block * PARTITIONS
                result.append(Queries(sequence, head, first, min(PARTITIONS, case.queries - first)))
    return result


def spans_of(case, queries):
    """The spans of all heads of some queries: as many heads side by side as fit on 128 rows."""
    heads = 1
    for count in range(1, case.group + 1):
        if case.group % count == 0 and count * queries.count <= PARTITIONS:
            heads = count
    first = first_key(case.masks, queries.first)
    start = case.prefix + first if first > 0 else 0
    end = case.keys
    if case.masks.causal:
        end = min(end, case.prefix + queries.first + queries.count)
    count = blocks(end - start, case.tuning.span)
    size = blocks(blocks(end - start), count) * PARTITIONS
    result = []
    for head in range(0, case.group, heads):
        before = None
        for begin in range(start, end, size):
            stop = min(end, begin + size)
            recomputed = 0
            if heads * queries.count == PARTITIONS:
                recomputed = recomputed_blocks(case, queries, begin, stop)
            before = Span(queries, head, heads, begin, stop, recomputed, before, stop == end)
            result.append(before)
    return result


def recomputed_blocks(case, queries, start, end):
    """How many blocks at the start of a span are computed twice: a share of it, of blocks that all queries see."""
    part, whole = case.tuning.recomputed_share
    wanted = blocks(end - start) * part // whole
    count = 0
    while count < wanted:
        first = start + count * PARTITIONS
        if mask_of_keys(case, queries, first, min(end, first + PARTITIONS)) is not None:
            return count
        count = count + 1
    return count


def mask_of_keys(case, queries, start, end):
    """The mask of one block of keys for some queries; None if each of them sees each key."""
    return mask_of(case.masks, queries.count, case.prefix + queries.first - start, end - start)

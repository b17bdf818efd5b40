"""The tiles of queries of attention_prefill, and the spans of keys that their rows pass."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.prefill.keys import place_keys
from nki_kernels.tiles import PARTITIONS, aligned_tile, blocks


class Queries(nl.NKIObject):
    """`count` queries of a sequence, at most 128, from query `first` on: of all heads that share a key/value head.

    tile: [D in tile, head, tile, query], once they are loaded.
    """

    def __init__(self, prompts, sequence, kv_head, first):
        self.sequence, self.kv_head, self.first = sequence, kv_head, first
        self.count = min(PARTITIONS, prompts.queries - first)
        self.tile = None

    def load(self, prompts):
        """Load the queries, transposed by DMA, times the scale of their keys in a cache with scales."""
        first = self.sequence * prompts.queries + self.first
        group = prompts.share.group
        start = prompts.share.query_head(self.kv_head, 0) * prompts.depth
        source = prompts.q[first : first + self.count, start : start + group * prompts.depth]
        shape = (prompts.tile_depth, group, prompts.depth_tiles, self.count)
        self.tile = aligned_tile(shape, prompts.dtype)
        # The scale of a head's keys multiplies the queries, so that scores are products of the stored numbers.
        factor = None if prompts.scales is None else prompts.scales.keys[:, self.kv_head : self.kv_head + 1]
        place_keys(prompts, self.tile, source.reshape_dim(1, (group, prompts.depth)), factor)


@dataclass
class Sink(nl.NKIObject):
    """What comes before the first span of rows with sinks: their logits as maxima [row, 1], and sums of weights 1."""

    maximum: nl.NkiTensor
    sums: nl.NkiTensor


class Span(nl.NKIObject):
    """Rows (queries of `heads` heads from `first_head` on) and keys start … end of `head`, with the steps' tiles.

    `before` is the rows' span before, or their `Sink`, or None; `last` tells whether no span follows. Scores of keys
    before `split` are computed again. `sums` is None where the product of few keys needs no copy.
    """

    def __init__(self, launch, queries, head, first_head, start, end, before, last):
        prompts, tuning = launch.prompts, launch.tuning
        self.queries, self.head, self.before, self.last = queries, head, before, last
        self.first_head, self.heads = first_head, heads_together(prompts.share.group, queries.count)
        self.start, self.end = start, end
        self.rows = rows = self.heads * queries.count
        self.split = start
        if rows == PARTITIONS and end - start > tuning.shortest:
            self.split += PARTITIONS * recomputed_blocks(launch, queries, head, start, end)
        self.scores = nl.ndarray((rows, end - start), dtype=nl.float32, buffer=nl.sbuf)
        self.maximum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        self.bias = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        self.shift = None
        if self.split > start:
            self.shift = nl.ndarray((PARTITIONS, rows), dtype=prompts.dtype, buffer=nl.sbuf)
        self.product = nl.ndarray((rows, prompts.value_depth + 1), dtype=nl.float32, buffer=nl.psum)
        self.sums = None
        if before is not None or not last or end - start > tuning.few:
            self.sums = nl.ndarray((rows, prompts.value_depth + 1), dtype=nl.float32, buffer=nl.sbuf)
        self.result = None
        if last:
            self.result = nl.ndarray((rows, prompts.value_depth), dtype=prompts.dtype, buffer=nl.sbuf)


@dataclass
class Chunk(nl.NKIObject):
    """Keys start … end of a span that one exp takes, with their weights [key, block, row].

    scores: [key, block, row] @ PSUM of keys whose scores are computed again.
    """

    span: Span
    start: int
    end: int
    weights: nl.NkiTensor
    scores: object = None


def list_queries(prompts, masks):
    """Return the tiles of queries of this core, in the order of their work.

    The last queries of a sequence see most keys, the first ones few. They take turns: alone, the few keys of the first
    ones would not fill the pipeline. Those in the middle come first: the pipeline fills while they wait for few keys.
    """
    result = []
    share = prompts.share
    count = blocks(prompts.queries)
    for pair in range(share.pairs):
        seen_by_core = [0] * share.cores
        for i in range(count):
            block = count // 2 + i // 2 if i % 2 == 0 else count // 2 - 1 - i // 2
            sequence, kv_head = pair // prompts.kv_heads, pair % prompts.kv_heads
            queries = Queries(prompts, sequence, kv_head, block * PARTITIONS)
            start, end = key_range(prompts, masks, queries)
            if share.owner(pair, end - start, seen_by_core) == share.core:
                result.append(queries)
    return result


def spans_of(launch, queries, head):
    """Return the spans of all heads of some queries: as many heads side by side as fit on 128 rows."""
    start, end = key_range(launch.prompts, launch.masks, queries)
    count = blocks(end - start, launch.tuning.span)
    size = blocks(blocks(end - start), count) * PARTITIONS
    group = launch.prompts.share.group
    result = []
    for first_head in range(0, group, heads_together(group, queries.count)):
        before = sink_before(launch, queries, first_head)
        for first in range(start, end, size):
            stop = min(end, first + size)
            before = Span(launch, queries, head, first_head, first, stop, before, stop == end)
            result.append(before)
    return result


def sink_before(launch, queries, first_head):
    """Return the sinks of heads side by side of some queries, one per row; None if there are none."""
    prompts = launch.prompts
    if prompts.step.sinks is None:
        return None
    name = f"{queries.kv_head} {first_head} {queries.count}"
    if name not in launch.sinks:
        heads = heads_together(prompts.share.group, queries.count)
        rows = heads * queries.count
        logits = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        pattern = [[1, heads], [0, queries.count], [1, 1]]
        offset = prompts.share.query_head(queries.kv_head, first_head)
        nisa.dma_copy(dst=logits, src=prompts.step.sinks.ap(pattern=pattern, offset=offset))
        maximum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        # exp multiplies a maximum by its scale, which a sink, as a finished logit, must not take.
        nisa.tensor_scalar(dst=maximum, data=logits, op0=nl.multiply, operand0=1.0 / launch.exp_scale)
        depth = prompts.value_depth
        sums = nl.ndarray((rows, depth + 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=sums[:, 0:depth], value=0.0)
        nisa.memset(dst=sums[:, depth : depth + 1], value=1.0)
        launch.sinks[name] = Sink(maximum, sums)
    return launch.sinks[name]


def heads_together(group, queries):
    """Return how many heads of a group have their queries side by side: as many as fit on 128 rows."""
    heads = 1
    for count in range(1, group + 1):
        if group % count == 0 and count * queries <= PARTITIONS:
            heads = count
    return heads


def prepare_masks(launch, queries):
    """Make the mask of the diagonal: later GpSimd would wait for the Vector engine, which cleans the first keys."""
    if launch.masks.causal:
        launch.masks.new_mask(queries.count, 0, PARTITIONS)
        launch.masks.identity(queries.count, heads_together(launch.prompts.share.group, queries.count))


def key_range(prompts, masks, queries):
    """Return the keys that some queries see: from a first one to behind the last one."""
    first = masks.first_key(queries.first)
    start = prompts.prefix + first if first > 0 else 0
    end = prompts.keys
    if masks.causal:
        end = min(end, prompts.prefix + queries.first + queries.count)
    return start, end


def recomputed_blocks(launch, queries, head, start, end):
    """Return how many blocks at the start of a span are computed twice: a share of it, that all queries see."""
    tuning = launch.tuning
    share = tuning.recomputed_share_of_short if end - start <= tuning.short else tuning.recomputed_share
    most = blocks(end - start) * share[0] // share[1]
    count = 0
    while count < most:
        first = start + count * PARTITIONS
        if mask_of_keys(launch, queries, head, first, min(end, first + PARTITIONS)) is not None:
            return count
        count = count + 1
    return count


def mask_of_keys(launch, queries, head, start, end):
    """Return the mask of one block of keys for some queries; None if each of them sees each key."""
    prefix, masks = launch.prompts.prefix, launch.masks
    if start >= prefix or masks.window is None:
        return masks.new_mask(queries.count, prefix + queries.first - start, end - start)
    return masks.cached_mask(head, queries.first, start)[0 : queries.count, 0 : end - start]

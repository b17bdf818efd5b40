"""The tiles of queries of attention_prefill, and the spans of keys that their rows pass.

A tile of queries has up to 128 queries of one sequence, of all heads that share a key/value head on this core. A *row*
is one query of one head: up to 128 rows pass the keys at a time, of several heads where a tile has few queries. A
*span* is a range of keys whose scores for these rows lie in SBUF at one time.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.prefill.keys import transpose_into_blocks
from nki_kernels.tiles import PARTITIONS, allocate_aligned_tile, blocks, ranges


class Queries(nl.NKIObject):
    """Tile of `count` queries of a sequence, at most 128, from query `first` of a `Stream` on, for one key/value head.

    It has all query heads of `kv_head` that this core takes. `tile` is None until `load`, then [D in tile, head, tile
    of D, query] @ SBUF.
    """

    def __init__(self, stream, sequence, kv_head, first):
        self.stream, self.sequence, self.kv_head, self.first = stream, sequence, kv_head, first
        self.count = min(PARTITIONS, stream.queries - first)
        self.tile = None

    def load(self, prompts):
        """Load the queries from HBM into a new `tile`, transposed by DMA.

        In a cache with scales the queries are multiplied by the scale of their head's keys.
        """
        first = self.find_row()
        group = prompts.share.group
        start = prompts.share.index_query_head(self.kv_head, 0) * prompts.depth
        source = self.stream.q[first : first + self.count, start : start + group * prompts.depth]
        shape = (prompts.tile_depth, group, prompts.depth_tiles, self.count)
        self.tile = allocate_aligned_tile(shape, prompts.dtype)
        # The scale of a head's keys multiplies the queries, so that scores are products of the stored numbers.
        factor = None if prompts.scales is None else prompts.scales.keys[:, self.kv_head : self.kv_head + 1]
        transpose_into_blocks(prompts, self.tile, source.reshape_dim(1, (group, prompts.depth)), factor)

    def find_row(self):
        """Return the row of the first query in q and o of the stream."""
        return self.sequence * self.stream.queries + self.first


@dataclass
class Sink(nl.NKIObject):
    """State of rows with sinks before their first span, float32 @ SBUF.

    `maximum` [row, 1] is the sink's logit divided by `exp_scale`, and `sums` [row, Dv + 1] are zeros with a weight of 1
    in the last column.
    """

    maximum: nl.NkiTensor
    sums: nl.NkiTensor


class Span(nl.NKIObject):
    """Keys start … end - 1 of `head` for some rows, with the tiles that the steps write.

    The rows are the queries of a tile for `heads` query heads. `before` is the span of the same rows before this one,
    their `Sink` for a first span, or None. `last` tells whether no span of the rows follows. Scores of keys before
    `split` are computed as [key, row], a second time. Bounded scores all are, once, and then `scores`, `maximum` and
    `bias` are None. `sums` is None if one span has all keys of the rows and they are few.

    Args:
        first_head: index of the first head among those of the key/value head on this core.
    """

    def __init__(self, launch, queries, head, first_head, start, end, before, last):
        prompts, tuning = launch.prompts, launch.tuning
        self.queries, self.head, self.before, self.last = queries, head, before, last
        self.first_head, self.heads = first_head, count_heads_together(prompts.share.group, queries.count)
        self.start, self.end = start, end
        self.rows = rows = self.heads * queries.count
        self.scores, self.maximum, self.bias, self.shift = None, None, None, None
        self.split = end
        if not prompts.step.bounded:
            self.split = start
            if rows == PARTITIONS and end - start > tuning.shortest:
                self.split += PARTITIONS * count_recomputed_blocks(launch, queries, head, start, end)
            self.scores = nl.ndarray((rows, end - start), dtype=nl.float32, buffer=nl.sbuf)
            self.maximum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            self.bias = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
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
    """Keys start … end - 1 of a span that one exp takes, and their weights [key, block, row] @ SBUF.

    `scores` [key, block, row] @ PSUM is for keys whose scores are computed as [key, row], else None.
    """

    span: Span
    start: int
    end: int
    weights: nl.NkiTensor
    scores: object = None


def list_queries(prompts, masks):
    """Return the tiles of queries of this core as a list of `Queries`, not loaded, in the order of their work.

    One pair of sequence and key/value head follows the other. The last queries of a sequence see most keys, the first
    ones few. They take turns: alone, the few keys of the first ones would not fill the pipeline. Those in the middle
    come first: the pipeline fills while they wait for few keys.
    """
    result = []
    share = prompts.share
    tiles = []
    for stream in prompts.streams:
        for start, _ in ranges(0, stream.queries):
            tiles.append((stream, start))
    count = len(tiles)
    for pair in range(share.pairs):
        seen_by_core = [0] * share.cores
        for i in range(count):
            block = count // 2 + i // 2 if i % 2 == 0 else count // 2 - 1 - i // 2
            sequence, kv_head = pair // prompts.kv_heads, pair % prompts.kv_heads
            stream, first = tiles[block]
            queries = Queries(stream, sequence, kv_head, first)
            start, end = find_key_range(prompts, masks, queries)
            if share.choose_core(pair, end - start, seen_by_core) == share.core:
                result.append(queries)
    return result


def create_spans(launch, queries, head):
    """Return a list of new `Span` for a tile of queries: all keys for some heads, then for the next heads.

    As many heads pass together as have at most 128 rows, a row being one query of one head. The keys that any query of
    the tile sees are divided into spans of about equal size. Sinks are loaded from HBM at their first use.
    """
    bounds = list_span_bounds(launch, queries)
    group = launch.prompts.share.group
    result = []
    for first_head in range(0, group, count_heads_together(group, queries.count)):
        before = load_row_sinks(launch, queries, first_head)
        for i in range(len(bounds)):
            start, end = bounds[i]
            before = Span(launch, queries, head, first_head, start, end, before, i + 1 == len(bounds))
            result.append(before)
    return result


def list_span_bounds(launch, queries):
    """Return (start, end) of the spans of keys that a tile of queries passes, in order.

    With pages of 4 bits the first span has the tile's own pages as they are, so that each row sees some of its keys.
    Cached and rounded keys of earlier pages follow. Bounded scores do not lie in SBUF, so one span has all keys.
    """
    prompts = launch.prompts
    start, end = find_key_range(prompts, launch.masks, queries)
    if prompts.step.bounded:
        return [(start, end)]
    bounds = []
    if prompts.page > 0:
        bounds.append((prompts.prefix + queries.first, end))
        last = queries.first + queries.count - 1
        end = prompts.cached_keys + last // prompts.page * prompts.page
    if end > start:
        count = blocks(end - start, launch.tuning.span)
        bounds.extend(ranges(start, end, blocks(blocks(end - start), count) * PARTITIONS))
    return bounds


def load_row_sinks(launch, queries, first_head):
    """Return the `Sink` of the rows of a tile's heads from `first_head` on; None if the launch has no sinks.

    It is loaded from HBM at the first call for these heads and number of queries, and kept in `launch.sinks`.
    """
    prompts = launch.prompts
    if prompts.step.sinks is None:
        return None
    name = f"{queries.kv_head} {first_head} {queries.count}"
    if name not in launch.sinks:
        heads = count_heads_together(prompts.share.group, queries.count)
        rows = heads * queries.count
        logits = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        pattern = [[1, heads], [0, queries.count], [1, 1]]
        offset = prompts.share.index_query_head(queries.kv_head, first_head)
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


def count_heads_together(group, queries):
    """Return how many of `group` heads have their rows on the 128 partitions together, `queries` rows each.

    It is the largest divisor of `group` whose rows fit, or 1.
    """
    heads = 1
    for count in range(1, group + 1):
        if group % count == 0 and count * queries <= PARTITIONS:
            heads = count
    return heads


def prepare_masks(launch, queries):
    """Make the mask of a causal launch's diagonal blocks and its identity, kept in `launch.masks`; else do nothing.

    Made later, on GpSimd, they would wait for the Vector engine, which cleans the first keys.
    """
    if launch.prompts.page > 0:
        launch.masks.make_page_mask(queries.count, queries.count, launch.prompts.page, True)
    if launch.masks.causal:
        launch.masks.make_new_mask(queries.count, 0, PARTITIONS)
        launch.masks.make_identity(
            queries.count, count_heads_together(launch.prompts.share.group, queries.count)
        )


def find_key_range(prompts, masks, queries):
    """Return (first, end) of the keys in SBUF that any query of a `Queries` tile sees; `end` is not one of them.

    With pages of 4 bits there are others between them: new keys of other tiles, and rounded ones of later pages.

    Keys count from the first cached position. New keys follow the cached ones, which are padded to blocks of 128.
    """
    first = masks.find_first_key(queries.first)
    start = prompts.prefix + first if first > 0 else 0
    end = prompts.keys
    if masks.causal:
        end = min(end, prompts.prefix + queries.first + queries.count)
    return start, end


def count_recomputed_blocks(launch, queries, head, start, end):
    """Return how many blocks of 128 keys, from key `start` on, have their scores computed a second time.

    A tile of queries sees the keys start … end - 1. The number is at most the share that the tuning names, and counting
    ends before the first block that has a mask.
    """
    tuning = launch.tuning
    share = tuning.recomputed_share_of_short if end - start <= tuning.short else tuning.recomputed_share
    most = blocks(end - start) * share[0] // share[1]
    count = 0
    while count < most:
        first = start + count * PARTITIONS
        if find_mask(launch, queries, head, first, min(end, first + PARTITIONS)) is not None:
            return count
        count = count + 1
    return count


def find_mask(launch, queries, head, start, end):
    """Return the mask [query, key] @ SBUF of keys start … end - 1, of one block, for a `Queries` tile.

    It is None if each query sees each key. Masks have 0 where a query sees a key, else MASKED.
    """
    prefix, masks = launch.prompts.prefix, launch.masks
    page, first = launch.prompts.page, launch.prompts.cached_keys + queries.first
    if page > 0:
        # Keys of a block before the tile's own one are in earlier pages, and so are all cached ones.
        if start < first:
            return None
        return masks.make_page_mask(queries.count, end - start, page, start >= prefix)
    if start >= prefix or masks.window is None:
        return masks.make_new_mask(queries.count, prefix + queries.first - start, end - start)
    return masks.make_cached_mask(head, queries.first, start)[0 : queries.count, 0 : end - start]

"""What attention_prefill computes, in pieces: the sizes of a launch, its tiles of queries and their spans of keys."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import CacheScales
from nki_kernels.prefill.cores import divide_heads, owner, query_head
from nki_kernels.prefill.masks import Masks, cached_mask, first_key, identity, mask_of
from nki_kernels.prefill.room import fit
from nki_kernels.tiles import PARTITIONS, blocks


class Tuning(nl.NKIObject):
    """Sizes and distances of the pipeline, in keys, chosen by trying others; gen2, which is not `wide`, has slower DMA.

    Keys of several parts take longer than values, so products wait longer for their weights.

    span                   keys whose scores lie in SBUF at one time: as many as fit beside 8192 keys and values
    span_with_slopes       that with slopes, where the distances of the keys lie in SBUF as well
    scores                 keys of one PSUM tile of scores: two banks, so that three tiles fit beside the rest
    exponents, recomputed  keys of one exp from SBUF and from PSUM
    recomputed_share       the share of keys whose scores are computed again; spans up to `short` take a larger one, as
                           loads and stores are a larger part of their DMAs, but if `wide` a smaller one of keys of
                           several parts, each of which is a product more; those up to `shortest` none
    few                    up to so many keys the Vector engine divides the product, else GpSimd what Scalar copied
    exponents_after        from the last score of a span to its first exp: until the shift is known; `exponents_first`
                           in the beginning, and one key later for every `ramp` keys
    recompute_after        from there on to the scores that are computed again, and `by_key_after` to their exp
    multiply_after         from an exp to its products: until the transposes have arrived
    finish_after           from the last product to its copy, `store_after` to the store
    cache_after            between the writes of 1024 keys and values to a cache
    values_after           between the cleanings of 1024 values, which products wait for later than scores for keys
    queries_ahead          tiles of queries that are loaded before they are needed
    heads_ahead            tiles of queries before its first one at which a head is loaded, and `cleaned_ahead` at which
                           its keys are cleaned, for which the Vector engine waits until they have arrived
    """

    def __init__(self, dtype, wide, parts):
        narrow = dtype == nl.bfloat16
        self.span = 8192 if narrow and wide else 4096
        self.span_with_slopes = 3072
        self.scores = 1024
        self.exponents = 1536 if narrow else 1024
        self.recomputed = 1024 if wide else 512
        self.recomputed_share = (2, 9) if wide else (1, 3)
        self.recomputed_share_of_short = (1, 8) if wide and parts > 1 else (1, 3)
        if not narrow:
            self.recomputed_share = (0, 1)
            self.recomputed_share_of_short = (0, 1)
        self.short = 2048
        self.shortest = 1024
        self.few = 256
        self.exponents_first = 400
        self.exponents_after = 3000 if narrow else 1500
        self.ramp = 32
        self.recompute_after = 4500
        self.by_key_after = 5500
        self.multiply_after = 12000 if narrow else 6000
        self.finish_after = 2000
        self.store_after = 4096
        self.cache_after = 16384
        self.values_after = 2048
        self.queries_ahead = 6
        self.heads_ahead = 8
        self.cleaned_ahead = 4
        if narrow and wide and parts > 1:
            self.exponents = 1280
            self.multiply_after = 14000
            self.store_after = 16384
            self.values_after = 3072
            self.heads_ahead = 12


@dataclass
class PromptStep(nl.NKIObject):
    """The arguments of a launch beside its tokens and its cache, by the names of `attention_prefill`'s parameters.

    `scales` are those of the cache, see `load_scales`.
    """

    scale: float
    prefix: int
    positions: object = None
    window: object = None
    softcap: object = None
    sinks: object = None
    causal: bool = True
    slopes: object = None
    scales: CacheScales | None = None


class Case(nl.NKIObject):
    """The arguments and sizes of a launch, and tiles that all of its steps use; o takes its results.

    `stored`: the cache has the new keys and values already.
    """

    def __init__(self, o, q, k, v, cache, step):
        self.o = o
        self.q = q
        self.k = k
        self.v = v
        self.stored = k is None
        self.cache = cache
        self.sequences, self.kv_heads = cache.sequences, cache.kv_heads
        self.depth, self.value_depth = cache.depth, cache.value_depth
        self.scale = step.scale
        self.causal = step.causal
        self.positions = step.positions
        self.cached = step.prefix
        self.window = step.window
        self.softcap = step.softcap
        self.sinks = step.sinks
        self.sinks_by_rows = {}
        self.slopes = step.slopes
        self.scales = step.scales
        self.slopes_by_rows = {}
        self.places = {}
        self.distances = {}


def prepare(case):
    """Work out the sizes that follow from the arguments, and fill the tiles that all steps use."""
    case.dtype = case.q.dtype
    case.filling = True
    case.group = case.q.shape[1] // (case.kv_heads * case.depth)
    divide_heads(case)
    case.queries = case.q.shape[0] // case.sequences
    case.new_keys = case.queries if case.stored else case.k.shape[0] // case.sequences
    case.prefix = blocks(case.cached) * PARTITIONS
    case.keys = case.prefix + case.new_keys
    # Padding behind a prompt, which a causal mask hides, may hold anything; without one every new key counts.
    case.cleans = case.causal or case.prefix > 0 or case.scales is not None
    divide_depth(case)
    case.masks = Masks(case.dtype, case.causal, case.window)
    case.tuning = Tuning(case.dtype, nisa.get_nc_version() > nisa.nc_version.gen2, case.parts)
    case.exp_scale = case.scale
    if case.softcap is not None:
        case.exp_scale = case.softcap
    if case.softcap is not None or case.slopes is not None:
        case.tuning.recomputed_share = (0, 1)
        case.tuning.recomputed_share_of_short = (0, 1)
    if case.slopes is not None:
        case.tuning.span = case.tuning.span_with_slopes
    fit(case)
    case.minus_one = column(-1.0)
    case.minus_scale = column(-case.exp_scale)


def divide_depth(case):
    """Divide D into parts of at most 128, of equal heights but for the last one; pieces are parts of one height.

    A piece is (first part, end, height), and begins at element first * part_depth.
    """
    case.parts = blocks(case.depth)
    case.part_depth = blocks(case.depth, case.parts)
    last = case.depth - (case.parts - 1) * case.part_depth
    case.heights = [case.part_depth] * (case.parts - 1) + [last]
    case.pieces = [(0, case.parts, case.part_depth)]
    if last < case.part_depth:
        case.pieces = [(0, case.parts - 1, case.part_depth), (case.parts - 1, case.parts, last)]


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
        self.keys = None
        self.masks = {}


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
        self.head = queries.keys
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


class Sink(nl.NKIObject):
    """What stands before the first span of some rows where there are sinks: their logit as maximum, a sum of 1."""

    def __init__(self, maximum, sums):
        self.maximum = maximum
        self.sums = sums


def sink_before(case, queries, first_head, heads):
    """The sinks of some heads of some queries, one per row; None if there are none."""
    if case.sinks is None:
        return None
    name = f"{queries.head} {first_head} {queries.count}"
    if name not in case.sinks_by_rows:
        rows = heads * queries.count
        logits = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        pattern = [[1, heads], [0, queries.count], [1, 1]]
        offset = query_head(case, queries, first_head)
        nisa.dma_copy(dst=logits, src=case.sinks.ap(pattern=pattern, offset=offset))
        maximum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=maximum, data=logits, op0=nl.multiply, operand0=1.0 / case.exp_scale)
        sums = nl.ndarray((rows, case.value_depth + 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=sums[:, 0 : case.value_depth], value=0.0)
        nisa.memset(dst=sums[:, case.value_depth : case.value_depth + 1], value=1.0)
        case.sinks_by_rows[name] = Sink(maximum, sums)
    return case.sinks_by_rows[name]


def all_queries(case):
    """The queries of this core, in the order of their work.

    The last queries of a sequence see most keys, the first ones few. They take turns: alone, the few keys of the first
    ones would not fill the pipeline. Those in the middle come first: the pipeline fills while they wait for few keys.
    """
    result = []
    count = blocks(case.queries)
    for sequence in range(case.sequences):
        for head in range(case.kv_heads):
            given = [0] * case.cores
            for i in range(count):
                block = count // 2 + i // 2 if i % 2 == 0 else count // 2 - 1 - i // 2
                first = block * PARTITIONS
                queries = Queries(sequence, head, first, min(PARTITIONS, case.queries - first))
                start, end = key_range(case, queries)
                if owner(case, queries, given, end - start) == case.core:
                    result.append(queries)
    return result


def spans_of(case, queries):
    """The spans of all heads of some queries: as many heads side by side as fit on 128 rows."""
    heads = heads_beside(case, queries)
    start, end = key_range(case, queries)
    count = blocks(end - start, case.tuning.span)
    size = blocks(blocks(end - start), count) * PARTITIONS
    result = []
    for head in range(0, case.group, heads):
        before = sink_before(case, queries, head, heads)
        for begin in range(start, end, size):
            stop = min(end, begin + size)
            recomputed = 0
            if heads * queries.count == PARTITIONS and stop - begin > case.tuning.shortest:
                recomputed = recomputed_blocks(case, queries, begin, stop)
            before = Span(queries, head, heads, begin, stop, recomputed, before, stop == end)
            result.append(before)
    return result


def heads_beside(case, queries):
    """How many heads of some queries lie side by side: as many as fit on 128 rows."""
    heads = 1
    for count in range(1, case.group + 1):
        if case.group % count == 0 and count * queries.count <= PARTITIONS:
            heads = count
    return heads


def prepare_masks(case, queries):
    """Make the mask of the diagonal: later GpSimd would wait for the Vector engine, which cleans the first keys."""
    if case.masks.causal:
        mask_of(case.masks, queries.count, 0, PARTITIONS)
        identity(case.masks, queries.count, heads_beside(case, queries))


def key_range(case, queries):
    """The keys that some queries see: from a first one to behind the last one."""
    first = first_key(case.masks, queries.first)
    start = case.prefix + first if first > 0 else 0
    end = case.keys
    if case.masks.causal:
        end = min(end, case.prefix + queries.first + queries.count)
    return start, end


def recomputed_blocks(case, queries, start, end):
    """How many blocks at the start of a span are computed twice: a share of it, of blocks that all queries see."""
    part, whole = case.tuning.recomputed_share
    if end - start <= case.tuning.short:
        part, whole = case.tuning.recomputed_share_of_short
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
    distance = case.prefix + queries.first - start
    if start >= case.prefix or case.window is None:
        return mask_of(case.masks, queries.count, distance, end - start)
    name = f"{start}"
    if name not in queries.masks:
        queries.masks[name] = cached_mask(case.masks, queries.keys.cached.count, queries.first, start)
    return queries.masks[name][0 : queries.count, 0 : end - start]

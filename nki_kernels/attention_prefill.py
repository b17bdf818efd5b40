"""attention_prefill: attention of the new tokens of some sequences with cached ones and each other; fills the caches.

    o[t, h] = sum over s of softmax over s (score[t, h, s]) * v[s, g],   g = h // (Hq / Hk)
    score[t, h, s] = scale * q[t, h] . k[s, g], with a soft cap c: c * tanh(that / c)
    s runs over the valid cached positions and the new tokens of t's own sequence: up to t if `causal`, and less than
    `window` before t if there is one. A sink is a logit of its head that takes part in the sum of the softmax only.
    Slopes (ALiBi) add slopes[h] * (position of s - position of t), a position bias (T5) a number of each such distance.

Dimensions:
    T   tokens of B sequences, L = T / B of each, one sequence behind the other; D head size of queries and keys; Dv of
    values, which is D in a paged cache; Hq query heads;
    Hk  key/value heads, each serving Hq/Hk query heads; S positions of a contiguous cache;
    P   pages of a paged cache, of `page` positions each; N pages of a sequence.

Arguments:
    q             [T, Hq * D] @ HBM, float32 or bfloat16
    k, v          [T, Hk * D] and [T, Hk * Dv] @ HBM, q's dtype; without `causal` they may have another number of rows
                  (cross attention). Both None: the caches hold the new keys and values already, of another layer of
                  the step
    k_cache       [B, Hk, D, S] or paged [P, page, Hk, D] @ HBM, any float dtype, or int8 with scales; or None, as in an
                  encoder or a denoiser: nothing is stored. Then k, v and num_kv_heads are needed, and no prefix
    v_cache       [B, Hk, S, Dv] or paged [P, page, Hk, D] @ HBM, as k_cache
    scale         compile-time float > 0, usually D ** -0.5
    num_kv_heads  compile-time int or None; Hk, as the caches have it
    positions     [T, 1] int32 @ HBM; that of a sequence's first token is how many cached positions are valid
    prefix        compile-time int, a bucket: so many cached positions are read. 0: none, and the new tokens have the
                  positions of a contiguous cache from 0 on
    slots         [T, 1] int32 @ HBM: number of a page * page + offset, where a paged cache takes each new token
    block_tables  [B, N] int32 @ HBM: pages of each sequence, in order
    window        compile-time int or None
    softcap       compile-time float or None
    sinks         [1, Hq] float32 @ HBM or None
    causal        compile-time bool
    slopes        [1, Hq] float32 @ HBM or None
    cache_rows    [B, 1] int32 @ HBM: the row of contiguous caches that takes each sequence, or None: row b takes
                  sequence b. Without a prefix
    k_scale, v_scale  [1, Hk] float32 @ HBM or both None: a cached number stands for itself times the scale of its head;
                  with caches of int8 or float8_e4m3, see `cache.scales`
    k_pages, v_pages  uint8 @ HBM or both None: pages of 4 bits, as in attention_decode. New tokens begin a page, and
                  read earlier pages, those among themselves included, as 4 bits hold them
    sequences     compile-time int or None; B, as the caches have it, or without caches 1 for None
    key_lengths   [B, 1] int32 @ HBM or None: sequence b sees its first key_lengths[b] keys only, at least 1. Rows of k
                  and v behind them are padding and may hold anything. Without `causal` and prefix
    position_bias [Hq, 2 L - 1] @ HBM, float32 or bfloat16, or None: position_bias[h, j - i + L - 1] is added to the
                  score of query i and key j, after the scale. Without `causal`, prefix and soft cap, with Hq = Hk
    text_q        [T2, Hq * D] @ HBM or None: rows of a second stream (joint attention of images and texts). The keys of
                  sequence b are its rows of k, then those of text_k. Without caches, `causal`, lengths and biases
    text_k, text_v  [T2, Hk * D] and [T2, Hk * Dv] @ HBM, or None
    bounded       compile-time bool: no score exceeds 64 in magnitude, as norms of heads make sure. Without `causal`,
                  caches, sinks, a soft cap and biases
    returns o     [T, Hq * Dv] @ HBM, q's dtype, and the two caches; o alone without k and v, or without caches; with a
                  second stream o and text_o [T2, Hq * Dv]

Layout
    Scores are [query, key]: their maximum is a reduction along the free dim, and exp takes it as a bias. The product
    with the values contracts over keys, so it takes the weights as [key, query]: DMA transposes them. Queries and keys
    are transposed to [D, t] on their way from HBM. The values have a column of ones, which makes the sum of the weights
    a column of the product. Padded tokens behind a causal prompt may be NaN or infinite: such elements of k and v count
    as 0. Cached positions that are not valid may hold anything (prefill/cached.py). So may keys behind a key length:
    they become copies of the first key, and their values 0 (prefill/lengths.py), also in caches.

Tiling
    for each sequence and key/value head: its keys and values stay in SBUF (prefill/keys.py)
        for 128 queries, one head after the other, short sequences with several heads side by side (prefill/spans.py)
            for a span of up to 8192 keys (4096 on gen2 and in float32): the scores go to SBUF in float32, and with them
            the maximum. It is exact, so any finite scores are safe; only several spans take an online softmax.
            exp, transposes, products (prefill/span_steps.py)
    Steps of about four tiles overlap in the order that prefill/order.py explains. Blocks of 128 x 128 scores that a
    mask empties are skipped; those that it cuts get it by a matmul with an identity (prefill/masks.py).

    On a logical core of two physical ones (LNC2) each core takes its heads or its queries (prefill/cores.py).

    In bfloat16 the DMA engines transpose some three quarters of them. For the rest the Tensor engine computes the
    scores again, as [key, query], and adds minus the maximum by a matmul of three rows; their exp needs no transpose.
    Both ways give a row the same shift, so they add up. They do while the float32 sums of the two products agree to far
    better than the range of exp: for scores up to 1e7.

    Bounded scores need no maximum: exp of them, and 12288 times that, are normal numbers of bfloat16 and float32. So
    each score is computed once, as [key, query], and neither the Vector engine nor a DMA passes over it.

Limits:
    D and Dv up to 512; L up to S and up to 8192; prefix + L up to 12288, and so many that a head's keys and values take
    at most 64 KiB per partition: 8192 in float32, with D = 256 in bfloat16, half with D = 512; so many query heads of a
    key/value head that three tiles of 128 queries fit beside them (8 at D = 512 on every chip); pages of 1, 2, 4 … 128
    positions. Slopes with causal attention, without a soft cap and sinks.

Cost
    HBM: q, k, v and o once, L rows of each cache once. Tensor engine: 2 L^2 D B Hq multiplications, half of them
    skipped if causal, and a sixth more; the Vector engine reads each score once, the Scalar engine takes one exp of it,
    and DMA transposes three quarters of the weights. The four are busy at the same time; for L = 8192 the Vector engine
    alone takes 1190 us. Predicted for D = 128, Hk = 1 in bfloat16 on trn2, in microseconds in program order and
    scheduled, and as a share of the floor (FLOP at 78.6 TFLOP/s): Hq = 4: L = 2048 98 and 97 (56 %), 4096 327 and 326
    (67 %), 8192 1246 and 1231 (70 and 71 %). Two cores, Hq = 2, of half of the floor: L = 2048 37 and 36 (37 and 38 %),
    4096 102 and 97 (53 and 56 %), 8192 337 and 331 (65 and 66 %).

    Heads of 192 elements with values of 128, L = 2048 (latent attention): a score takes two products, so an eighth of
    the scores is computed twice, and DMA transposes the rest. Hq = Hk = 16 486 and 479 us (56 %), 4 129 and 122 (53 %),
    2 68 and 63 (50 %).

    Of all with all, without caches, in program order, and as a share of the largest bound of FLOP, HBM bytes and exp
    (153 G/s of the Scalar engine, the largest for heads below 128):
        3 heads of 128, 4096 + 512 rows (FLUX, 8 ranks)           572 us  73 %  bounded 470  88 %
        4 heads of 64, 4096 + 333 rows (SD3.5 has 24)             706 us  73 %  bounded 583  88 %
        4 heads of 72, 4096 rows (PixArt has 16)                  595 us  74 %
        16 heads of 72, two sequences of 1024                     339 us  65 %  with caches 445
        the same queries, 120 padded keys each                    121 us  24 %
        16 heads of 72, 4096 queries and 120 or 300 padded keys   216 and 299 us  25 and 43 %
        64 heads of 64, 512 rows, with biases and padding (T5)    280 us  39 %
    In 595 us the Scalar engine is busy for 541, the Vector engine for 580 with the maximum of each score, DMA for 586:
    exp on another engine would shorten none of the other two. What did not help: all scores of 1024 keys computed
    twice, which needs no transposes (471, a quarter of them 366); for 120 keys, a quotient by the Vector engine, which
    waits for its own reciprocal. Of bounded scores exp is the bound, in instructions of three banks, of which PSUM
    holds two beside the products. In two banks the 583 us are 651; products issued an exp earlier make 518 of 470 us.

    With slopes the Vector engine passes twice over the scores (prefill/slopes.py) and none is computed twice: 192 and
    174 us for Hq = 4, L = 2048.

    What was tried, for L = 4096 in program order: a running maximum and rescaling for every 512 keys with transposes
    on the Tensor engine, 2463; all transposes by DMA, 395; an eighth of them on the Tensor engine, whose results the
    Scalar engine copies, 353. The share of scores on GpSimd (exp as a power) or evacuated by the Scalar engine changed
    nothing: the DMAs and the Tensor engine are the next bounds. A twelfth of the scores evacuated by the Scalar engine,
    with their maximum by GpSimd: 329 to 354, as the Vector and Scalar engines wait for each other's PSUM; PSUM tiles of
    1536 scores: 344; one store for all heads of a tile: the same.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.cache.create import create_prompt_cache
from nki_kernels.cache.nibble_pages import widen_pages_reference
from nki_kernels.cache.packed_pages import PageArguments
from nki_kernels.cache.scales import load_scales, store_reference, use_reference
from nki_kernels.prefill.cached import Cached, load_cached, store_new
from nki_kernels.prefill.checks import check_prefill, check_room
from nki_kernels.prefill.cores import is_stored_here, needs_late_stores, wait_for_reads
from nki_kernels.prefill.key_blocks import LOADED_BLOCKS
from nki_kernels.prefill.keys import (
    BlockLoad,
    Head,
    clean_new_keys,
    clean_new_values,
    fill_gap,
    load_new_keys,
    load_new_values,
)
from nki_kernels.prefill.lengths import KeyLengths, hide_keys, hide_values
from nki_kernels.prefill.order import Agenda, score_bounded_span, score_span
from nki_kernels.prefill.prompts import PrefillLaunch, Prompts, PromptStep
from nki_kernels.prefill.reference import (
    attend_jointly_reference,
    attend_new_reference,
    attend_pages_reference,
    attend_sequence_reference,
    hide_rows_reference,
)
from nki_kernels.prefill.spans import create_spans, list_queries, prepare_masks
from nki_kernels.prefill.uncached import create_no_cache
from nki_kernels.tiles import PARTITIONS, blocks, expect_dims

cores = (1, 2)


@nki.jit
def attention_prefill(
    q,
    k_cache: nt.mutable_tensor,
    v_cache: nt.mutable_tensor,
    scale,
    k=None,
    v=None,
    num_kv_heads=None,
    positions=None,
    prefix=0,
    slots=None,
    block_tables=None,
    window=None,
    softcap=None,
    sinks=None,
    causal=True,
    slopes=None,
    cache_rows=None,
    k_scale=None,
    v_scale=None,
    k_pages=None,
    v_pages=None,
    sequences=None,
    key_lengths=None,
    position_bias=None,
    text_q=None,
    text_k=None,
    text_v=None,
    bounded=False,
):
    """Compute the attention of prompts' new tokens over each other and over cached positions.

    Returns (o [T, Hq * Dv] in q's dtype, k_cache, v_cache); new keys and values are written to the
    caches. Without k and v the caches already hold them. Then, and without caches, nothing is written, and
    o alone is returned; with a second stream (o, text_o) are. The module docstring describes the arguments
    and limits; AssertionError if the arguments violate them.
    """
    expect_dims(2, q, "q [T, Hq * D]")
    assert (k_cache is None) == (v_cache is None), (
        "k_cache and v_cache come together: pass both, or None for both"
    )
    if k_cache is None:
        cached = {"slots": slots, "block_tables": block_tables, "cache_rows": cache_rows}
        cached = {**cached, "k_scale": k_scale, "v_scale": v_scale, "k_pages": k_pages, "v_pages": v_pages}
        cache = create_no_cache(k, v, num_kv_heads, sequences, prefix, cached)
    else:
        pages = PageArguments(k_pages, v_pages)
        cache = create_prompt_cache(k_cache, v_cache, slots, block_tables, cache_rows, pages)
    assert cache_rows is None or (k is not None and prefix == 0), (
        "cache_rows name rows that k and v are written to from position 0 on: give k and v, and no prefix"
    )
    step = PromptStep(
        scale, prefix, positions, window, softcap, sinks, causal, slopes, key_lengths, position_bias, bounded
    )
    check_prefill((q, k, v), cache, step, num_kv_heads, (text_q, text_k, text_v))
    assert sequences is None or sequences == cache.sequences, (
        f"sequences is {sequences}, but the caches have {cache.sequences}; pass {cache.sequences} or None"
    )
    columns = q.shape[1] // cache.depth * cache.value_depth
    o = nl.ndarray((q.shape[0], columns), dtype=q.dtype, buffer=nl.shared_hbm)
    scales = load_scales(k_scale, v_scale, cache)
    if text_q is not None:
        text_o = nl.ndarray((text_q.shape[0], columns), dtype=q.dtype, buffer=nl.shared_hbm)
        text = text_o, (text_q, text_k, text_v)
        attend_prompts(Prompts(o, (q, k, v), cache, step, scales, text))
        return o, text_o
    attend_prompts(Prompts(o, (q, k, v), cache, step, scales))
    if k is None or k_cache is None:
        return o
    return o, k_cache, v_cache


def attend_prompts(prompts):
    """Issue all instructions of a launch on this core, which write o and the new cache entries.

    For each tile of up to 128 queries: load queries and keys of later tiles ahead, then compute its scores
    while steps of earlier tiles are issued between. `check_prefill` has accepted the arguments before.

    Raises:
        AssertionError: the query heads of a key/value head do not fit into SBUF beside its keys and values.
    """
    launch = PrefillLaunch(prompts)
    check_room(launch)
    tiles = list_queries(prompts, launch.masks)
    agenda = Agenda(launch)
    heads = HeadLoads(launch, agenda, tiles)
    loaded = 0
    time = 0
    for i in range(len(tiles)):
        if loaded == 0:
            prepare_masks(launch, tiles[i])
            # The first queries precede the keys in the DMA queue, so that no score waits for queries behind them.
            tiles[i].load(prompts)
            loaded = 1
        time = heads.load_near(i, time)
        heads.clean_near(i, time)
        while loaded < min(len(tiles), i + launch.ahead.queries):
            tiles[loaded].load(prompts)
            loaded += 1
        for span in create_spans(launch, tiles[i], heads.find_head(i)):
            if prompts.step.bounded:
                time = score_bounded_span(agenda, span, time)
            else:
                time = score_span(agenda, span, time)
    time = agenda.issue_all(time)
    if needs_late_stores(prompts):
        # A block table may name pages of the other core, so neither core writes before both have read their prefixes.
        wait_for_reads(prompts.cache)
        for head in heads.heads:
            schedule_loads(agenda, time, launch.tuning.cache_after, store_new, head)
    agenda.issue_all(time)


class HeadLoads(nl.NKIObject):
    """The key/value heads that tiles of queries attend to, in the order in which the heads are loaded.

    heads: the `Head`s that are loaded so far. cleaned: how many of these are done in `clean_near`. A time
    counts keys: the scores of one key for 128 queries take about a nanosecond.
    """

    def __init__(self, launch, agenda, tiles):
        self.launch, self.agenda, self.tiles = launch, agenda, tiles
        self.heads = []
        self.cleaned = 0

    def find_head(self, i):
        """Return the `Head` that tile number i of queries attends to."""
        return self.heads[-1 - self.count_early(i)]

    def count_early(self, i):
        """Return how many heads are loaded whose first tile of queries comes after tile i."""
        count = 0
        while self.heads[-1 - count].first > i:
            count += 1
        return count

    def load_near(self, i, time):
        """Load the key/value head of tile i of queries, and the next head if a tile soon after i needs it.

        Heads that are loaded already are skipped. Without room for two heads in SBUF, all pending steps are
        issued first. Returns the time after those steps, else `time`.
        """
        for k in range(i, min(len(self.tiles), i + self.launch.ahead.heads)):
            queries = self.tiles[k]
            if self.heads:
                last = self.heads[-1]
                loaded = last.sequence == queries.sequence and last.number == queries.kv_head
                if loaded or k < last.first:
                    continue
                # SBUF has room for some heads that are loaded early, beside the two that scores and products read.
                if self.count_early(i) >= self.launch.ahead.early_heads:
                    break
            # Without room for two heads, all steps that read the one in SBUF are issued before the next is loaded.
            if not self.launch.ahead.two_heads_fit:
                time = self.agenda.issue_all(time)
            self.heads.append(load_head(self.launch, self.heads, queries, k, choose_cleaning_engine(i)))
        return time

    def clean_near(self, i, time):
        """Clean the loaded heads whose first tile of queries comes within `tuning.cleaned_ahead` tiles of tile i.

        Cleaning sets NaNs and infinities of new keys and values to 0, as padding behind a prompt may hold
        them, and rounds both to a cache with scales. Without a causal mask, prefix and scales nothing is
        cleaned, as every new key counts then. Keys and values behind a key length are replaced before.

        Keys are cleaned now, later than they are loaded: the engine that cleans waits for the load, and its
        later work too. Cleaning of values and the writes to the caches are scheduled after `time`.
        """
        prompts, tuning = self.launch.prompts, self.launch.tuning
        for head in self.heads[self.cleaned :]:
            if head.first >= i + tuning.cleaned_ahead:
                return
            if self.launch.biases is not None:
                self.launch.biases.split_window(head)
            if prompts.gap > 0:
                fill_gap(prompts, head)
            if head.lengths is not None:
                hide_keys(prompts, head)
                schedule_loads(self.agenda, time, tuning.values_after, hide_values, head)
            if prompts.step.causal or prompts.cached_keys > 0 or prompts.scales is not None:
                # With a prefix `load_head` has cleaned them, because the first key fills places that are not valid.
                if prompts.cached_keys == 0:
                    clean_new_keys(prompts, head, choose_cleaning_engine(i))
                # The first span of pages of 4 bits has few keys, so that its product with values comes early.
                values_after = tuning.values_after if prompts.page == 0 else 0
                schedule_loads(self.agenda, time, values_after, clean_new_values, head)
            if not needs_late_stores(prompts):
                schedule_loads(self.agenda, time, self.launch.ahead.cache_after, store_new, head)
            self.cleaned += 1


def choose_cleaning_engine(i):
    """Return the engine that cleans keys before tile i of queries: Vector for the first tile, then GpSimd."""
    return nisa.engine.vector if i == 0 else nisa.engine.gpsimd


def load_head(launch, heads, queries, first, engine):
    """Load all cached and new keys and values of the key/value head that `queries` attend to.

    Returns the `Head` that holds them in SBUF. With a prefix the new keys are cleaned at once, because the
    first new key replaces cached ones that are not valid.

    Args:
        heads: the `Head`s that are loaded before; the last one shares its cached positions if its sequence is
            the same.
        first: number of the first tile of queries of this head.
        engine: the engine that cleans keys.
    """
    prompts = launch.prompts
    # All heads of a sequence see the same positions, which are found once for all of them.
    same_sequence = len(heads) > 0 and heads[-1].sequence == queries.sequence
    lengths = None
    if prompts.step.key_lengths is not None:
        lengths = heads[-1].lengths if same_sequence else KeyLengths(prompts, queries.sequence)
    head = Head(prompts, queries.sequence, queries.kv_head, first, lengths)
    if prompts.stored:
        prompts.cache.load_stored(prompts, head)
    else:
        load_new_keys(prompts, head)
    if prompts.cached_keys > 0:
        clean_new_keys(prompts, head, engine)
        head.take_cached(heads[-1].cached if same_sequence else Cached(prompts, head.sequence))
    for block in range(0, prompts.cached_keys // PARTITIONS, LOADED_BLOCKS):
        load_cached(prompts, head, block)
    if launch.biases is not None:
        head.take_window(launch.biases.load_window(head.number))
    # New values are loaded behind all keys, because the scores need only keys.
    if not prompts.stored:
        load_new_values(prompts, head)
        if prompts.share.both_load and prompts.cached_keys > 0 and not needs_late_stores(prompts):
            # Each core reads the whole prefix, which may cover the places where the other one writes its new positions.
            wait_for_reads(prompts.cache)
    return head


def schedule_loads(agenda, time, distance, step, head):
    """Schedule `step` once for each DMA load of a head's new keys and values, `distance` apart, after `time`.

    `step` is `clean_new_values`, `hide_values`, or `store_new`, which writes to the caches: then loads that
    the other core stores are left out. Times and distances count keys, of about a nanosecond each.
    Distances are long enough that values are cleaned after the first scores, and that writes do not hold up
    DMAs for which others wait.
    """
    prompts = agenda.launch.prompts
    for first in range(0, blocks(prompts.new_keys), LOADED_BLOCKS):
        time += distance
        if step != store_new or is_stored_here(prompts, first // LOADED_BLOCKS):
            agenda.note(time, step, BlockLoad(head, first))


def attention_prefill_reference(
    q: np.ndarray,
    k_cache: np.ndarray | None,
    v_cache: np.ndarray | None,
    scale: float,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    num_kv_heads: int | None = None,
    positions: np.ndarray | None = None,
    prefix: int = 0,
    slots: np.ndarray | None = None,
    block_tables: np.ndarray | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    causal: bool = True,
    slopes: np.ndarray | None = None,
    cache_rows: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    k_pages: np.ndarray | None = None,
    v_pages: np.ndarray | None = None,
    sequences: int | None = None,
    key_lengths: np.ndarray | None = None,
    position_bias: np.ndarray | None = None,
    text_q: np.ndarray | None = None,
    text_k: np.ndarray | None = None,
    text_v: np.ndarray | None = None,
    bounded: bool = False,
) -> np.ndarray | tuple[np.ndarray, ...]:
    """Compute o [T, Hq * Dv] with NumPy, by a float32 softmax of the masked score matrix of each sequence.

    Returns (o in q's dtype, k_cache, v_cache); the caches are updated in place. Without k and v, or
    without caches, o alone is returned, or (o, text_o).
    """
    options = scale, window, softcap, sinks, causal, slopes, position_bias
    if k_cache is None or v_cache is None:
        assert k is not None and v is not None and num_kv_heads is not None
        sizes = num_kv_heads, sequences or 1
        if text_q is not None and text_k is not None and text_v is not None:
            return attend_jointly_reference((q, k, v), (text_q, text_k, text_v), *sizes, options)
        return attend_new_reference((q, k, v), *sizes, options, key_lengths)
    if k_pages is not None and v_pages is not None:
        assert k is not None and v is not None and block_tables is not None and slots is not None
        old = widen_pages_reference(k_pages, v_pages, q.dtype)
        first = positions if prefix else None
        o = attend_pages_reference((q, k, v), old, block_tables, first, options)
        index = np.divmod(slots[:, 0], k_cache.shape[1])
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[index] = new.reshape(len(new), *cache.shape[2:])
        return o, k_cache, v_cache
    count = len(k_cache if block_tables is None else block_tables)
    rows = np.arange(count) if cache_rows is None else cache_rows[:, 0]
    count = count if cache_rows is None else len(rows)
    depth, width = k_cache.shape[2 if block_tables is None else 3], v_cache.shape[3]
    heads = k_cache.shape[1 if block_tables is None else 2]
    new_keys = len(q if k is None else k) // count
    if key_lengths is not None and k is not None and v is not None:
        k, v = hide_rows_reference((k, v), key_lengths)
    results = []
    scales = [by_head if by_head is None else by_head.reshape(-1, 1) for by_head in (k_scale, v_scale)]
    for b in range(count):
        valid = int(np.split(positions, count)[b][0, 0]) if prefix and positions is not None else 0
        if slots is None or block_tables is None:
            caches = k_cache[rows[b]].transpose(2, 0, 1), v_cache[rows[b]].transpose(1, 0, 2)
            old_keys, old_values = (cache[:valid].copy() for cache in caches)
            new_index: tuple[np.ndarray, ...] = (np.arange(valid, valid + new_keys),)
        else:
            caches = k_cache, v_cache
            old_keys, old_values = (
                cache[block_tables[b]].reshape(-1, heads, size)[:valid].copy()
                for cache, size in zip(caches, (depth, width))
            )
            new_index = np.divmod(np.split(slots, count)[b][:, 0], k_cache.shape[1])
        new = [
            cache[new_index]
            if new is None
            else store_reference(np.split(new, count)[b].reshape(-1, heads, size), head_scale, cache.dtype)
            for cache, new, size, head_scale in zip(caches, (k, v), (depth, width), scales)
        ]
        caches[0][new_index], caches[1][new_index] = new
        keys, values = (
            np.concatenate([use_reference(rows, head_scale) for rows in pair])
            for pair, head_scale in zip(((old_keys, new[0]), (old_values, new[1])), scales)
        )
        seen = None if key_lengths is None else int(key_lengths[b, 0])
        queries = np.split(q, count)[b].reshape(-1, heads, q.shape[1] // (heads * depth), depth)
        results.append(attend_sequence_reference(queries, keys[:seen], values[:seen], options, valid))
    o = np.concatenate(results).astype(q.dtype)
    return o if k is None else (o, k_cache, v_cache)

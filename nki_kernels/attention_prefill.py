"""attention_prefill: attention of the new tokens of some sequences, and the caches filled with their keys and values.

    o[t, h] = sum over s of softmax over s (scale * q[t, h] . k[s, g]) * v[s, g],   g = h // (Hq / Hk)
    s runs over the tokens of t's own sequence: s <= t if `causal`, and t - s < window if there is one

Dimensions
    T   tokens of B sequences, L = T / B of each, one sequence behind the other; D head size; Hq query heads;
    Hk  key/value heads, each serving Hq/Hk query heads; S positions that the caches hold.

Arguments
    q             [T, Hq * D] @ HBM, float32 or bfloat16
    k, v          [T, Hk * D] @ HBM, q's dtype; without `causal` they may have another number of rows (cross attention)
    k_cache       [B, Hk, D, S] @ HBM, any float dtype; positions 0 … L-1 are written
    v_cache       [B, Hk, S, D] @ HBM, any float dtype; positions 0 … L-1 are written
    scale         compile-time float > 0, usually D ** -0.5
    num_kv_heads  compile-time int or None; Hk, as the caches have it
    window        compile-time int or None
    causal        compile-time bool
    returns o     [T, Hq * D] @ HBM, q's dtype, and the two caches

Layout
    Scores are [query, key]: their maximum is a reduction along the free dim, and exp takes it as a bias. The product
    with the values contracts over keys, so it takes the weights as [key, query]: DMA transposes them. Queries and keys
    are transposed to [D, t] on their way from HBM. The values have a column of ones, which makes the sum of the weights
    a column of the product. Padded tokens may be NaN or infinite: such elements of k and v count as 0.

Tiling
    for each sequence and key/value head: its keys and values stay in SBUF (prefill_keys)
        for 128 queries, one head after the other, short sequences with several heads side by side (prefill_plan)
            for a span of up to 8192 keys (4096 on gen2 and in float32): the scores go to SBUF in float32, and with them
            the maximum. It is exact, so any finite scores are safe; only several spans take an online softmax.
            exp, transposes, products (prefill_tiles)
    Steps of about four tiles overlap in the order that prefill_order explains. Blocks of 128 x 128 scores that a mask
    empties are skipped; those that it cuts get it by a matmul with an identity (prefill_masks).

    In bfloat16 the DMA engines transpose seven ninths of the weights. For the rest the Tensor engine computes the
    scores again, as [key, query], and adds minus the maximum by a matmul of three rows; their exp needs no transpose.
    Both ways give a row the same shift, so they add up. They do while the float32 sums of the two products agree to far
    better than the range of exp: for scores up to 1e7.

Limits
    D up to 128, even ones up to 256; L up to S and up to 8192.

Cost
    HBM: q, k, v and o once, L rows of each cache once. Tensor engine: 2 L^2 D B Hq multiplications, half of them
    skipped if causal, and a sixth more. Four engines are busy: of 1256 us for L = 8192 the Tensor engine works 1112,
    the Vector engine 1193, the Scalar engine 1075 and the DMAs 1198. Predicted for D = 128, Hk = 1 in bfloat16 on
    trn2, in microseconds in program order and scheduled: Hq = 4: L = 2048 108 and 104, 4096 335 and 329, 8192 1271 and
    1256, which are 51 and 53, 65 and 66, 69 and 70 % of the floor; Hq = 1: L = 8192 354 and 346, 62 and 63 %.

    What was tried, for L = 4096 in program order: a running maximum and rescaling for every 512 keys with transposes
    on the Tensor engine, 2463; all transposes by DMA, 395; an eighth of them on the Tensor engine, whose results the
    Scalar engine copies, 353.
"""

from __future__ import annotations

import nki
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.precision import widened
from nki_kernels.prefill_keys import (
    LOADED_BLOCKS,
    Head,
    allocate,
    load_new_keys,
    load_new_values,
    load_queries,
    row_range,
    store_new,
)
from nki_kernels.prefill_order import Agenda, issue, note, score_span
from nki_kernels.prefill_plan import Case, all_queries, spans_of
from nki_kernels.tiles import PARTITIONS, blocks, expect_dims

MAX_TOKENS = 8192
MAX_DEPTH = 256


@nki.jit
def attention_prefill(
    q,
    k,
    v,
    k_cache: nt.mutable_tensor,
    v_cache: nt.mutable_tensor,
    scale,
    num_kv_heads=None,
    window=None,
    causal=True,
):
    """Attention of new tokens with each other; their keys and values are written to the caches."""
    check_prefill(q, k, v, k_cache, v_cache, scale, num_kv_heads, window, causal)
    case = Case(q, k, k_cache, v_cache, scale, causal, window)
    work = all_queries(case)
    agenda = Agenda()
    head = None
    loaded = 0
    time = 0
    for i in range(len(work)):
        queries = work[i]
        while loaded < min(len(work), i + case.tuning.queries_ahead):
            load_queries(case, work[loaded], q)
            loaded = loaded + 1
        if head is None or head.sequence != queries.sequence or head.number != queries.head:
            if not case.two_heads_fit:
                issue(agenda, case, None)
            head = Head(queries.sequence, queries.head)
            load_head(case, head, k, v)
            note_stores(case, agenda, head, time)
        for span in spans_of(case, queries):
            span.head = head
            time = score_span(agenda, case, span, time)
    issue(agenda, case, None)
    return case.o, k_cache, v_cache


def load_head(case, head, k, v):
    """Load all keys and values of a head."""
    allocate(case, head)
    count = blocks(case.new_keys)
    for first in range(0, count, LOADED_BLOCKS):
        load_new_keys(case, head, k, first)
    for first in range(0, count, LOADED_BLOCKS):
        load_new_values(case, head, v, first)


def note_stores(case, agenda, head, time):
    """Note the writes to the caches: late enough not to hold up the DMAs that others wait for."""
    for first in range(0, blocks(case.new_keys), LOADED_BLOCKS):
        _, end = row_range(case, first)
        time = time + case.tuning.cache_after
        note(agenda, time, store_new, head, first, end)


def check_heads(q, k, v, k_cache, v_cache, scale, num_kv_heads):
    """Refuse queries, keys, values and caches whose shapes do not fit each other."""
    expect_dims(2, q, "q [T, Hq * D]")
    expect_dims(2, k, "k [T, Hk * D]")
    expect_dims(4, k_cache, "k_cache [B, Hk, D, S]")
    sequences, kv_heads, depth, capacity = k_cache.shape
    assert sequences == 1, f"attention takes the caches of one sequence, not of {sequences}"
    assert num_kv_heads is None or num_kv_heads == kv_heads, (
        f"{num_kv_heads} key/value heads, caches for {kv_heads}"
    )
    assert depth <= PARTITIONS, f"attention takes a head size of at most {PARTITIONS}, not {depth}"
    assert v_cache.shape == (sequences, kv_heads, capacity, depth), (
        f"v_cache is [{sequences}, {kv_heads}, {capacity}, {depth}] beside k_cache {k_cache.shape}, not {v_cache.shape}"
    )
    assert k.shape == (q.shape[0], kv_heads * depth), (
        f"k is [{q.shape[0]}, {kv_heads * depth}] for {kv_heads} heads of {depth}, not {k.shape}"
    )
    assert v.shape == k.shape, f"k is {k.shape}, v is {v.shape}"
    assert q.shape[1] % k.shape[1] == 0, f"q has rows of {q.shape[1]}, no multiple of k's {k.shape[1]}"
    assert q.dtype == k.dtype and q.dtype == v.dtype, f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}"
    assert scale > 0, f"scale is {scale}; the running maximum needs a positive one"


def check_prefill(q, k, v, k_cache, v_cache, scale, num_kv_heads, window, causal):
    """Refuse what this kernel does not compute."""
    expect_dims(2, q, "q [T, Hq * D]")
    expect_dims(2, k, "k [T, Hk * D]")
    expect_dims(4, k_cache, "k_cache [B, Hk, D, S]")
    sequences, kv_heads, depth, capacity = k_cache.shape
    assert num_kv_heads is None or num_kv_heads == kv_heads, (
        f"{num_kv_heads} key/value heads, caches for {kv_heads}"
    )
    assert depth <= MAX_DEPTH and (depth <= PARTITIONS or depth % 2 == 0), (
        f"attention_prefill takes head sizes up to {PARTITIONS}, and even ones up to {MAX_DEPTH}, not {depth}"
    )
    assert v_cache.shape == (sequences, kv_heads, capacity, depth), (
        f"v_cache is [{sequences}, {kv_heads}, {capacity}, {depth}] beside k_cache {k_cache.shape}, not {v_cache.shape}"
    )
    assert q.shape[0] % sequences == 0, f"{q.shape[0]} tokens do not divide into {sequences} sequences"
    tokens = k.shape[0] // sequences
    assert k.shape[1] == kv_heads * depth and (k.shape[0] == q.shape[0] or not causal), (
        f"k is [{q.shape[0]}, {kv_heads * depth}] for {kv_heads} heads of {depth}, not {k.shape}"
    )
    assert k.shape[0] % sequences == 0, f"{k.shape[0]} keys do not divide into {sequences} sequences"
    assert v.shape == k.shape, f"k is {k.shape}, v is {v.shape}"
    assert q.shape[1] % k.shape[1] == 0, f"q has rows of {q.shape[1]}, no multiple of k's {k.shape[1]}"
    assert q.dtype == k.dtype and q.dtype == v.dtype, f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}"
    assert q.dtype == nl.float32 or q.dtype == nl.bfloat16, (
        f"attention_prefill takes float32 or bfloat16, not {q.dtype}"
    )
    assert scale > 0, f"scale is {scale}; the running maximum needs a positive one"
    assert window is None or (causal and window > 0), (
        f"a window of {window} tokens needs causal attention and at least 1"
    )
    assert tokens <= capacity, f"a prompt of {tokens} tokens does not fit into caches of {capacity} positions"
    assert tokens <= MAX_TOKENS, f"attention_prefill takes at most {MAX_TOKENS} tokens, not {tokens}"


def attention_prefill_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    scale: float,
    num_kv_heads: int | None = None,
    window: int | None = None,
    causal: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Softmax of the whole masked score matrix in float32, sequence by sequence; the caches are updated in place."""
    sequences, kv_heads, depth, _ = k_cache.shape
    group = q.shape[1] // (kv_heads * depth)
    queries = widened(q).reshape(sequences, -1, kv_heads, group, depth).transpose(0, 2, 3, 1, 4)
    keys, values = (each.reshape(sequences, -1, kv_heads, depth).transpose(0, 2, 1, 3) for each in (k, v))
    tokens, count = queries.shape[3], keys.shape[2]
    k_cache[..., :count] = keys.transpose(0, 1, 3, 2)
    v_cache[:, :, :count] = values
    scores = queries @ widened(keys)[:, :, None].swapaxes(-1, -2) * queries.dtype.type(scale)
    distance = np.arange(tokens)[:, None] - np.arange(count)
    hidden = distance < (0 if causal else -count)
    if window is not None:
        hidden |= distance >= window
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    o = weights @ widened(values)[:, :, None]
    return o.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype), k_cache, v_cache

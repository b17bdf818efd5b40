"""attention_decode: attention of the new tokens of a batch with its caches; rotates them and writes them to the caches.

For token i of the n = T / B new ones of sequence b, at position p = positions[b * n + i], and query head h:

    o[h] = sum over s <= p of softmax over s (scale * q[h] . k[g, s]) * v[g, s]        with g = h // (Hq / Hk)

where k and v are those of the cache before the sequence's first new token, and the new ones from there on. Queries and
new keys are RMS-normalised head by head and rotated before, where weights and tables are given (see `rmsnorm`, `rope`).

Dimensions
    T   new tokens of B sequences, n of each, one sequence after the other; D head size (even); Hq query heads; Hk
    key/value heads; S positions that the caches hold; R <= D rotated elements of a head.

Arguments
    q             [T, Hq * D] @ HBM, float32 or bfloat16
    k, v          [T, Hk * D] @ HBM, q's dtype
    k_cache       [B, Hk, D, S] @ HBM, any float dtype; the new positions are written
    v_cache       [B, Hk, S, D] @ HBM, any float dtype; the new positions are written
    positions     [T, 1] @ HBM, int32, consecutive within a sequence, 0 <= position < S
    scale         compile-time float > 0, usually D ** -0.5
    num_kv_heads  compile-time int or None; Hk, as the caches have it
    cos, sin      [S, R/2] @ HBM, float32, or None: q and k are rotated already
    q_norm, k_norm  [1, D] @ HBM, both or None
    eps           compile-time float, of the norms
    returns o     [T, Hq * D] @ HBM, q's dtype, and the two caches

    The instructions do not depend on the positions: they address DMAs at run time and take part in the mask, and all S
    positions are read. So one compiled kernel serves every step. What a cache holds from the first new position on is
    never used, NaN included: such scores are replaced, and such values are set to zero.

Layout
    Positions lie on the partitions. A chunk of 128 keys is the stationary operand and the queries of its head move:
    scores [128 keys, chunk, query]. So the softmax of a head over 4096 positions takes 32 columns for each query, and
    the weights lie as the second product needs them: a chunk of values stationary, its weights moving, [D, query].
    Partition p of a chunk c holds position p * (S // 128) + c: rows of values that follow each other in HBM.

Tiling
    for groups of heads and sequences whose keys fill 1 MiB (a group of units, see decode_sizes), in program order:
        the scores of group i; the maximum of group i - 1; the product with the values of group i - 2; the exponentials
        of group i - 1. Loads run as far ahead as SBUF allows.
    The maximum is exact: no score overflows, and the largest weight of a query is one.
    New tokens are one chunk more, from SBUF: no load waits for the write to the cache.

Limits
    D up to 256, n * Hq / Hk and Hq up to 128, Hk * n up to 128, T * Hq up to 8192; two groups of keys and values fit in
    128 KiB per partition of SBUF: S up to 32768 at D = 128 in bfloat16.

Cost
    HBM: both caches once. Tensor engine: two matmuls for 128 positions of a kv head. Vector: five passes over
    the scores and one over the values. Predicted on trn2: 95 % of the floor for 16 sequences of 4096 positions with
    4 heads on 1, 40 % for one sequence, where loads, products and softmax follow each other. GpSimd takes 9.5 ns to
    address one element of a new key, 1.2 us for a head: below 2048 positions that is longer than the loads.
"""

from __future__ import annotations

import nki
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.decode_pipeline import (
    Work,
    add_values,
    find_largest,
    score_keys,
    start,
    weigh,
    write_values,
)
from nki_kernels.decode_sizes import Sizes
from nki_kernels.precision import widened
from nki_kernels.rmsnorm import rmsnorm_reference
from nki_kernels.tiles import PARTITIONS, expect_dims

MAX_DEPTH = 256
MAX_QUERIES = 8192


@nki.jit
def attention_decode(
    q,
    k,
    v,
    k_cache: nt.mutable_tensor,
    v_cache: nt.mutable_tensor,
    positions,
    scale,
    num_kv_heads=None,
    cos=None,
    sin=None,
    q_norm=None,
    k_norm=None,
    eps=1e-6,
):
    """Attention of the new tokens of a batch with its caches, to which their keys and values are written."""
    check_shapes(q, k, v, k_cache, v_cache, positions, scale, num_kv_heads)
    check_tables(k_cache, cos, sin, q_norm, k_norm)
    sizes = Sizes(q, k_cache)
    check_sizes(sizes)
    o = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    work = Work(sizes, scale, k_cache, v_cache, v, o)
    start(work, q, k, positions, (cos, sin), (q_norm, k_norm, eps))
    for step in range(work.items + 2):
        if step < work.items:
            score_keys(work, step)
        if 1 <= step <= work.items:
            find_largest(work, step - 1)
        if step >= 2:
            add_values(work, step - 2)
        if 1 <= step <= work.items:
            weigh(work, step - 1)
    write_values(work)
    return o, k_cache, v_cache


def check_shapes(q, k, v, k_cache, v_cache, positions, scale, num_kv_heads):
    """Refuse queries, keys, values, positions and caches whose shapes do not fit each other."""
    expect_dims(2, q, "q [T, Hq * D]")
    expect_dims(2, k, "k [T, Hk * D]")
    expect_dims(4, k_cache, "k_cache [B, Hk, D, S]")
    sequences, kv_heads, depth, capacity = k_cache.shape
    tokens = q.shape[0]
    assert num_kv_heads is None or num_kv_heads == kv_heads, (
        f"{num_kv_heads} key/value heads, caches for {kv_heads}"
    )
    assert depth <= MAX_DEPTH and depth % 2 == 0, (
        f"attention_decode takes an even head size of at most {MAX_DEPTH}, not {depth}"
    )
    assert v_cache.shape == (sequences, kv_heads, capacity, depth), (
        f"v_cache is [{sequences}, {kv_heads}, {capacity}, {depth}] beside k_cache {k_cache.shape}, not {v_cache.shape}"
    )
    assert tokens % sequences == 0, f"{tokens} tokens for caches of {sequences} sequences; each needs as many"
    assert k.shape == (tokens, kv_heads * depth), (
        f"k is [{tokens}, {kv_heads * depth}] for {kv_heads} heads of {depth}, not {k.shape}"
    )
    assert v.shape == k.shape, f"k is {k.shape}, v is {v.shape}"
    assert q.shape[1] % k.shape[1] == 0, f"q has rows of {q.shape[1]}, no multiple of k's {k.shape[1]}"
    assert q.dtype == k.dtype and q.dtype == v.dtype, f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}"
    assert positions.shape == (tokens, 1), f"positions are [{tokens}, 1], not {positions.shape}"
    assert scale > 0, f"scale is {scale}; the exact maximum needs a positive one"


def check_tables(k_cache, cos, sin, q_norm, k_norm):
    """Refuse tables and norms of which one is missing or has another shape than the heads need."""
    depth = k_cache.shape[2]
    assert (cos is None) == (sin is None), "cos and sin come together"
    if cos is not None:
        assert cos.shape == sin.shape, f"cos is {cos.shape}, sin is {sin.shape}"
        assert 2 * cos.shape[1] <= depth, (
            f"tables of width {cos.shape[1]} need heads of {2 * cos.shape[1]}, not {depth}"
        )
    assert (q_norm is None) == (k_norm is None), "q_norm and k_norm come together"
    if q_norm is not None:
        assert q_norm.shape == (1, depth) and k_norm.shape == (1, depth), (
            f"q_norm and k_norm are [1, {depth}], not {q_norm.shape} and {k_norm.shape}"
        )


def check_sizes(sizes):
    """Refuse more heads, tokens or positions than the tiles take."""
    assert sizes.heads <= PARTITIONS, (
        f"attention_decode takes at most {PARTITIONS} query heads, not {sizes.heads}"
    )
    assert sizes.queries <= PARTITIONS, (
        f"attention_decode takes at most {PARTITIONS} new queries of a kv head, not {sizes.queries}"
    )
    assert sizes.tokens * sizes.heads <= MAX_QUERIES, (
        f"attention_decode takes at most {MAX_QUERIES} heads of new tokens, not {sizes.tokens * sizes.heads}"
    )
    assert sizes.key_buffers > 0 and sizes.value_buffers > 0, (
        f"attention_decode takes caches of at most {sizes.most_positions} positions, not {sizes.capacity}"
    )


def attention_decode_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    positions: np.ndarray,
    scale: float,
    num_kv_heads: int | None = None,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    q_norm: np.ndarray | None = None,
    k_norm: np.ndarray | None = None,
    eps: float = 1e-6,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Softmax over the positions up to each new one, head by head, in float32; the caches are updated in place."""
    sequences, kv_heads, depth, _ = k_cache.shape
    tokens = len(q)
    heads = []
    for rows, weight in ((q, q_norm), (k, k_norm)):
        each = rows.reshape(-1, depth)
        if weight is not None:
            each = rmsnorm_reference(each, weight, eps)
        each = widened(each).reshape(tokens, -1, depth)
        if cos is not None and sin is not None:
            half = cos.shape[1]
            cosines, sines = widened(cos)[positions], widened(sin)[positions]
            first, second, rest = np.split(each, [half, 2 * half], axis=2)
            turned = first * cosines - second * sines, second * cosines + first * sines
            each = np.concatenate([*turned, rest], axis=2)
        heads.append(each.astype(q.dtype))
    outputs = []
    for token in range(tokens):
        sequence, here = token * sequences // tokens, int(positions[token, 0])
        k_cache[sequence, :, :, here] = heads[1][token]
        v_cache[sequence, :, here, :] = v[token].reshape(kv_heads, depth)
        queries = widened(heads[0][token]).reshape(kv_heads, -1, depth)
        for head in range(kv_heads):
            scores = queries[head] @ widened(k_cache[sequence, head, :, : here + 1])
            scores = scores * scores.dtype.type(scale)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            outputs.append(weights @ widened(v_cache[sequence, head, : here + 1]))
    return np.stack(outputs).reshape(q.shape).astype(q.dtype), k_cache, v_cache

"""latent_attention_decode: a decode step of multi-head latent attention, whose cache is one row a token.

For token i of the n = T / B new ones of sequence b, at position p = positions[b * n + i], and query head h:

    row[s] = [l | k]: the RMS-normalised latent and the rotated key of position s, shared by all heads
    a[h]   = w_uk[h]^T q_plain[h]                             the query in the latent space (absorbed)
    m[h]   = sum over s <= p of softmax over s (scale * (a[h] . l[s] + q_rope[h] . k[s])) * l[s]
    o[h]   = w_uv[h]^T m[h]

This equals attention with keys [k | w_uk l] and values w_uv l of every head, which are never formed. The rows of the
new tokens are normalised, rotated and written to the cache before it is read.

Dimensions:
    T   new tokens of B sequences, n of each, one sequence after the other; Hq query heads of R + P elements, of which
    the first R are rotated; L size of the latent; W = L + R; V value size of a head; S positions that the cache holds.

Arguments:
    q             [T, Hq * (R + P)] @ HBM, float32 or bfloat16, rotated: each head is [rotated | plain]
    kv            [T, W] @ HBM, q's dtype: latent and key of the new tokens, neither normalised nor rotated
    cache         [B, S, W] @ HBM, q's dtype, or with block_tables [P, block, W]; the new rows are written. With
                  row_scale it is int8, fp8 or bfloat16
    positions     [T, 1] @ HBM, int32, consecutive within a sequence, 0 <= position < S
    scale         compile-time float > 0
    norm_weight   [1, L] @ HBM, of the latent; eps: compile-time float
    cos, sin      [S, R/2] @ HBM, float32
    w_uk          [Hq * P, L] @ HBM, float32 or bfloat16: from latents to plain keys, one row for each element of a head
    w_uv          [L, Hq * V] @ HBM, float32 or bfloat16: from latents to values
    slots         [T, 1] @ HBM, int32, page * block + offset: where the rows of the new tokens are written
    block_tables  [B, N] @ HBM, int32: the pages of each sequence, in the order of positions, S = N * block
    row_scale     [1, 2] @ HBM, float32: scales of the latent and of the key in a cache of another dtype, see
                  `cache.scales`
    returns o     [T, Hq * V] @ HBM, q's dtype, and the cache

    The instructions do not depend on the positions: all S positions are read, and masks are computed at run time.

Layout
    Rows of the cache lie on the partitions. They are the values of the second product as they are, and transposed
    128 at a time they are the stationary operand of the first, whose queries move. A row ends with a mask for each new
    token, which the transpose makes one more element of the contraction: masking takes no pass over the scores.
    Partition p of a piece holds as many consecutive positions as the piece has chunks of 128.

Tiling
    for pieces of up to 1024 positions of each sequence (latent/sizes.py), in the order of latent/decode_items.py:
        transposes of piece i; scores of piece i - 1; exponentials of piece i - 2, and its product with the latents.
    The softmax is online over pieces, relative to the largest score so far: no score overflows.

Limits:
    n * Hq, P, T and R + n up to 128, L and V up to 512; T * Hq up to 4096 for L of 512 in bfloat16, half of it in
    float32; pages of 1, 2, 4 … 128 positions, S a multiple of 128 with pages; 2^24 rows of the cache. Rows behind a
    position may hold numbers whose scores stay below 1e30. One physical core works: of two the first.

Cost
    HBM: the cache and both projections once. Tensor engine for 128 positions: 5 transposes, 5 products of the queries,
    and 4 whose stationary operand is 128 latents of the rows. Predicted for L = 512, R = 64, P = V = 128 in bfloat16 in
    pages of 16, on trn2 in program order and scheduled, as shares of the floor: 16 sequences of 4096 positions with 16
    heads 63 and 69 %, with 2 heads 64 and 67 %, 4 sequences with 128 heads 48 and 56 %, one sequence of 32768 with 16
    heads 59 and 66 %. On trn1 47 and 49 %: its Tensor engine is busy for 583 us of 620.

    What was tried: the weights stationary and 512 latents moving, 128 heads took 58 and 72 % and all others fewer,
    those of 16 heads 51 and 59 %. Transposed chunks that lie part by part: the copies of two engines interleave and
    wait for each other, 16 sequences of 8192 positions and 2 heads took 704 us in place of 612 in program order.
"""

from __future__ import annotations

import nki
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.cache.latent import create_latent_cache
from nki_kernels.cache.scales import load_row_scales, spread_reference, store_reference, use_reference
from nki_kernels.latent.decode_items import LatentDecode, attend
from nki_kernels.latent.new_rows import prepare_new_rows, write_rows
from nki_kernels.latent.output import create_output_tile, project_values
from nki_kernels.latent.queries import absorb_queries, divide_heads, load_group
from nki_kernels.latent.sizes import Sizes, generate_key_positions
from nki_kernels.norms.norm import Norm
from nki_kernels.precision import widened
from nki_kernels.rmsnorm import rmsnorm_reference
from nki_kernels.rope import rope_reference
from nki_kernels.tiles import BANK, PARTITIONS, cast, expect_dims, load_repeated

cores = (1,)

MAX_QUERY_BYTES = 32768
"""Bytes per partition of the absorbed queries of all tokens: 4096 heads of tokens of 512 elements in bfloat16."""

MAX_ROWS = 2**24
"""Rows of a cache: run-time addresses are computed in float32."""


@nki.jit
def latent_attention_decode(
    q,
    kv,
    cache: nt.mutable_tensor,
    positions,
    scale,
    norm_weight,
    eps,
    cos,
    sin,
    w_uk,
    w_uv,
    slots=None,
    block_tables=None,
    row_scale=None,
):
    """Compute latent attention of a batch's new tokens over the cached rows and themselves.

    Returns (o [T, Hq * V] in q's dtype, cache); the rows of the new tokens, normalised and rotated, are
    written to the cache first. The module docstring describes the arguments and limits; AssertionError if
    the arguments violate them.
    """
    latent_cache = create_latent_cache(cache, slots, block_tables)
    check_rows(q, kv, latent_cache, row_scale)
    check_weights(q, cache, norm_weight, cos, sin, w_uk, w_uv)
    sizes = Sizes(q, latent_cache, w_uk, w_uv)
    check_sizes(sizes, positions, scale, cache)
    o = nl.ndarray((sizes.tokens, sizes.heads * sizes.value), dtype=q.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return o, cache
    scales = load_row_scales(row_scale, cache.dtype)
    loaded = load_group(q, w_uk, divide_heads(sizes)[0], sizes)
    token_positions = cast(load_repeated(positions.reshape((1, sizes.tokens)), PARTITIONS), nl.float32)
    rows = prepare_new_rows(kv, Norm(norm_weight, None, 0.0, eps), positions, cos, sin)
    if scales is not None:
        scales.round_latents(rows[:, 0 : sizes.rank])
        scales.round_keys(rows[:, sizes.rank : sizes.width])
    write_rows(cache, rows, latent_cache.compute_new_addresses(positions))
    latent_cache.load_addresses(sizes)
    latent_queries, turned_queries = absorb_queries(q, w_uk, loaded, sizes, scales)
    launch = LatentDecode(
        sizes, scale, latent_queries, turned_queries, token_positions, generate_key_positions(sizes), scales
    )
    latents = create_output_tile(sizes)
    attend(launch, latent_cache, latents)
    project_values(latents, w_uv, o, sizes)
    return o, cache


def check_rows(q, kv, latent_cache, row_scale):
    """Raise AssertionError if q, kv and the cache do not fit together.

    kv is [T, width of the cache's rows], all three have one dtype, the cache another one only with row_scale, and the
    cache checks its slots, tables and tokens.
    """
    expect_dims(2, q, "q [T, Hq * (R + P)]")
    tokens, width, cache = q.shape[0], latent_cache.width, latent_cache.rows
    assert kv.shape == (tokens, width), f"kv has to be [{tokens}, {width}], not {kv.shape}"
    assert q.dtype == kv.dtype and (q.dtype == cache.dtype or row_scale is not None), (
        f"q, kv and cache are {q.dtype}, {kv.dtype} and {cache.dtype}; all three need one dtype, or the cache row_scale"
    )
    latent_cache.check(tokens)
    latent_cache.check_decode()


def check_weights(q, cache, norm_weight, cos, sin, w_uk, w_uv):
    """Raise AssertionError if projections, rotary tables and norm weight do not fit q, the cache and each other.

    The cache's rows have the latent, as wide as w_uk, and the rotated key, twice as wide as cos; the heads of
    q, w_uk and w_uv have to be equally many.
    """
    expect_dims(2, w_uk, "w_uk [Hq * P, L]")
    expect_dims(2, w_uv, "w_uv [L, Hq * V]")
    rank, rope = w_uk.shape[1], cache.shape[2] - w_uk.shape[1]
    assert rope > 0 and cos.shape[1] * 2 == rope, (
        f"the cache has rows of {cache.shape[2]}; w_uk has latents of {rank}, cos keys of {2 * cos.shape[1]}: "
        f"rows of {rank + 2 * cos.shape[1]} hold both"
    )
    assert cos.shape == sin.shape, f"cos is {cos.shape}, sin is {sin.shape}; both need one shape"
    assert norm_weight.shape == (1, rank), f"norm_weight has to be [1, {rank}], not {norm_weight.shape}"
    assert w_uv.shape[0] == rank, f"w_uv has {w_uv.shape[0]} rows for a latent of {rank}: give [L, Hq * V]"
    heads = (q.shape[1] - w_uk.shape[0]) // rope
    fits = heads > 0 and heads * rope + w_uk.shape[0] == q.shape[1]
    assert fits and w_uk.shape[0] % heads == 0 and w_uv.shape[1] % heads == 0, (
        f"q of {q.shape[1]}, w_uk of {w_uk.shape[0]} rows and w_uv of {w_uv.shape[1]} columns have no common "
        "number of heads"
    )


def check_sizes(sizes, positions, scale, cache):
    """Raise AssertionError if positions, scale, tokens or sizes are not what the kernel takes.

    positions are [tokens, 1], the scale is positive, and the tokens are a multiple of the sequences. The
    module docstring has the limits of the sizes.
    """
    tokens = sizes.tokens
    assert positions.shape == (tokens, 1), f"positions have to be [{tokens}, 1], not {positions.shape}"
    assert tokens % sizes.sequences == 0, (
        f"{tokens} new tokens do not divide into {sizes.sequences} sequences: give each equally many"
    )
    assert scale > 0, f"scale is {scale}; the maximum needs a positive one"
    for name, size, most in (
        ("tokens", tokens, PARTITIONS),
        ("queries of a sequence", sizes.queries, PARTITIONS),
        ("bytes of queries in a partition", sizes.query_bytes, MAX_QUERY_BYTES),
        ("plain elements of a head", sizes.plain, PARTITIONS),
        ("rotated elements and new tokens of a sequence", sizes.rope + sizes.new, PARTITIONS),
        ("elements of the latent", sizes.rank, BANK),
        ("elements of a value", sizes.value, BANK),
        ("rows of the cache", cache.shape[0] * cache.shape[1], MAX_ROWS),
    ):
        assert size <= most, f"latent_attention_decode takes at most {most} {name}, not {size}"


def latent_attention_decode_reference(
    q: np.ndarray,
    kv: np.ndarray,
    cache: np.ndarray,
    positions: np.ndarray,
    scale: float,
    norm_weight: np.ndarray,
    eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
    w_uk: np.ndarray,
    w_uv: np.ndarray,
    slots: np.ndarray | None = None,
    block_tables: np.ndarray | None = None,
    row_scale: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute o with NumPy by absorbed queries and a softmax over all positions, token by token, in float32.

    Returns o and the cache, which is updated in place.
    """
    tokens, rank, width = len(q), w_uk.shape[1], cache.shape[2]
    sequences = len(cache) if block_tables is None else len(block_tables)
    new, rope = tokens // sequences, width - rank
    heads = (q.shape[1] - len(w_uk)) // rope
    latent = rmsnorm_reference(kv[:, :rank], norm_weight, eps)
    rows = np.concatenate([latent, rope_reference(kv[:, rank:], positions, cos, sin, 1)], axis=1)
    scales = spread_reference(row_scale, rank, width)
    rows = store_reference(rows, scales, cache.dtype)
    for token in range(tokens):
        row = token // new * cache.shape[1] + int(positions[token, 0])
        row = row if slots is None else int(slots[token, 0])
        cache[row // cache.shape[1], row % cache.shape[1]] = rows[token]
    turned, plain = np.split(q.reshape(tokens, heads, -1), [rope], axis=2)
    keys = widened(w_uk.astype(q.dtype)).reshape(heads, -1, rank)
    values = widened(w_uv.astype(q.dtype)).reshape(rank, heads, -1)
    o = []
    for token in range(tokens):
        pages = (
            cache[token // new : token // new + 1]
            if block_tables is None
            else cache[block_tables[token // new]]
        )
        cached = use_reference(pages.reshape(-1, width)[: int(positions[token, 0]) + 1], scales)
        absorbed = np.concatenate([widened(plain[token])[h : h + 1] @ keys[h] for h in range(heads)])
        asking = np.concatenate([widened(absorbed.astype(q.dtype)), widened(turned[token])], axis=1)
        scores = asking @ cached.T
        weights = np.exp((scores - scores.max(axis=1, keepdims=True)) * scores.dtype.type(scale))
        mixed = weights @ cached[:, :rank] / weights.sum(axis=1, keepdims=True)
        mixed = widened(mixed.astype(q.dtype))
        o.append(np.concatenate([mixed[h : h + 1] @ values[:, h] for h in range(heads)]).reshape(-1))
    return np.stack(o).astype(q.dtype), cache

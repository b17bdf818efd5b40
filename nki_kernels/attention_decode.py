"""attention_decode: attention of the new tokens of a batch with its caches; rotates them and writes them to the caches.

For token i of the n = T / B new ones of sequence b, at position p = positions[b * n + i], and query head h:

    o[h] = sum over s <= p of softmax over s (scale * q[h] . k[g, s]) * v[g, s]        with g = h // (Hq / Hk)

where k and v are those of the cache before the sequence's first new token, and the new ones from there on. Queries and
new keys are RMS-normalised head by head and rotated before, where weights and tables are given (see `rmsnorm`, `rope`).
Without k and v all are those of the cache, to which another layer of the same step wrote; then nothing is written.

Dimensions:
    T   new tokens of B sequences, n of each, one sequence after the other; D head size (even); Hq query heads; Hk
    key/value heads; S positions that the caches hold; R <= D rotated elements of a head.

Arguments:
    q             [T, Hq * D] @ HBM, float32 or bfloat16
    k, v          [T, Hk * D] @ HBM, q's dtype; or both None
    k_cache       [B, Hk, D, S] @ HBM, any float dtype, or int8 with scales; the new positions are written
    v_cache       [B, Hk, S, D] @ HBM, as k_cache; the new positions are written
                  or, with block_tables, both [P, block, Hk, D]: P pages of `block` positions each;
                  or, with cache_rows, as many rows [Hk, …] as there are, of which some are those of the sequences
    positions     [T, 1] @ HBM, int32, consecutive within a sequence, 0 <= position < S
    scale         compile-time float > 0, usually D ** -0.5
    num_kv_heads  compile-time int or None; Hk, as the caches have it
    cos, sin      [S, R/2] @ HBM, float32, or None: q and k are rotated already
    q_norm, k_norm  [1, D] @ HBM, both or None; q_norm alone without k
    eps           compile-time float, of the norms
    slots         [T, 1] @ HBM, int32, page * block + offset: where keys and values of the new tokens are written; None
                  without k and v
    block_tables  [B, N] @ HBM, int32: the pages of each sequence, in the order of positions, S = N * block; pages may
                  be shared, and what lies behind the last position may name any page
    window        compile-time int or None: a token sees so many positions up to its own
    softcap       compile-time float or None: a score x * scale becomes softcap * tanh(x * scale / softcap)
    sinks         [1, Hq] @ HBM, float32, or None: a score of each head that takes part in the sum only
    rope_positions  [T, 1] @ HBM, int32, or None: the rows of cos and sin, where they are not the positions: tables of
                  pages of a window may begin behind a sequence's first position, from which positions count then
    position_group  nki.collectives.ReplicaGroup of ranks with equal k and v that divide the positions, or None
    position_ranks  compile-time int N, a power of two: the length of this rank's list; caches hold S / N slots then
    position_rank   [1, 1] @ HBM, int32: the place of this rank in its list
    cache_rows      [B, 1] @ HBM, int32: the row of both caches that holds each sequence, or None: row b holds sequence
                    b. Without k, v and block_tables
    k_scale, v_scale  [1, Hk] @ HBM, float32 > 0, or both None: a cached number stands for itself times the scale of its
                  head; with caches of int8 or float8_e4m3, see `cache.scales`
    k_pages, v_pages  uint8 @ HBM, as `cache.nibble_pages` has them, or both None: the full pages, which block_tables
                  names then. k_cache and v_cache [Q, block, Hk, D] are the pages that new tokens fill, and so are
                  those of slots. A token attends to its own page there, and to earlier ones as 4 bits hold them; block
                  is a power of two, D = 8, 16 … 128. `pack_pages` rounds a page once it is full
    newest_tables  [B, M] @ HBM, int32: first the page of k_cache and v_cache that has each sequence's newest positions
    returns o     [T, Hq * D] @ HBM, q's dtype, and the two caches; o alone without k and v

    The instructions do not depend on the positions: they address DMAs at run time and take part in the mask, and all S
    positions are read. So one compiled kernel serves every step. What a cache holds from the first new position on is
    never used, NaN included: such scores are replaced, and such values are set to zero.

Layout
    Positions lie on the partitions. A chunk of 128 keys is the stationary operand and the queries of its head move:
    scores [128 keys, chunk, query]. So the softmax of a head over 4096 positions takes 32 columns for each query, and
    the weights lie as the second product needs them: a chunk of values stationary, its weights moving, [D, query].
    Partition p of a chunk c holds position p * (S // 128) + c: rows of values that follow each other in HBM.

Tiling
    for groups of heads and sequences whose keys fill 1 MiB (a group of units, see `decode.sizes`), in program order:
        the scores of group i; the maximum of group i - 1; the product with the values of group i - 2; the exponentials
        of group i - 1. Loads run as far ahead as SBUF allows.
    Up to 2048 positions all keys come first, and the values when all weights are known: the new keys can be written
        once all keys have been read, under the loads of the values.
    The maximum is exact: no score overflows, and the largest weight of a query is one.
    New tokens are one chunk more, from SBUF: no load waits for the write to the cache. Sinks are keys of that chunk.

Two cores
    Kv heads are divided if their number is even and they are not in pages, else sequences, else slots (8192 or more) in
    two contiguous halves, which exchange partial outputs (see decode/merge.py). A barrier orders both cores' loads
    before both cores' writes.

Ranks that divide positions
    Position p is slot p // N of the rank at place p % N. So the shares of a sequence differ by one position at most,
    whatever its length, and block tables and slots are the same on all ranks. A rank attends for the queries of all
    ranks with its slots: an all-gather brings the queries, an all-to-all of partial outputs in float32 ends the launch.

Limits:
    D up to 512, n * Hq / Hk and Hq up to 128, n up to 96 where there are sinks and k, T * Hq up to 8192; two groups of
    keys and values fit in 128 KiB per partition of SBUF: S up to 32768 at D = 128 in bfloat16. From pages S is a
    multiple of 128, and fewer positions fit, because keys lie in SBUF twice; of pages of 4 bits S is up to 16384 there,
    with the newest page.

Cost
    HBM: both caches once. Tensor engine: two matmuls for 128 positions of a kv head. Vector: five passes over
    the scores and one over the values. Predicted on trn2: 95 % of the floor for 16 sequences of 4096 positions with
    4 heads on 1, 40 % for one sequence, where loads, products and softmax follow each other. GpSimd takes 9.5 ns to
    address one element of a new key, 1.2 us for a head: below 2048 positions that is longer than the loads of the
    values, and keys and new keys share no time: 71 % for 64 sequences of 1024. For
    pages it takes 9.5 ns to address a piece of up to 4 KiB, and Scalar copies transposed keys: 12 to 17 % more at 4096
    positions. So all kv heads of a sequence, whose rows in a page make one piece, are loaded together while S * Hk is
    up to 21845 at D = 128 in bfloat16: 423 us for 32 sequences of 2048 positions with 4 heads on 4, where contiguous
    caches take 417. Beyond, a piece has the heads of one position that fit: 16 sequences of 8192 positions with 4 heads
    on 16 take 5058 us (contiguous 793).
    On two cores 90 % for 16 sequences of 8192 positions; one sequence of 8192 gains 10 %. Eight ranks that
    share a kv head take 154 us for 64 sequences of 8192 positions (undivided 788), of which 24 us are two collectives.
    Caches of fp8 are operands as they are: 62 us for 16 sequences of 4096 positions with 4 heads on 1, where bfloat16
    takes 93, and 386 us in place of 695 for 64 sequences of 8192 positions with one head. From pages of 16 positions
    fp8 takes 99 us scheduled, bfloat16 96: GpSimd addresses as many pieces, and Scalar copies as many transposed keys.
    DMA casts caches of int8: 174 us. Conversion on chip was tried: keys on the Scalar engine, values on GpSimd take 129
    us in program order, and 223 from pages, where Vector converts keys before they are transposed.
    Pages of 4 bits take 139 us scheduled and 217 in program order for these 16 sequences, in pages of 16: Vector
    splits bytes and multiplies keys by their scales, Scalar converts values, whose scales multiply the weights. With
    scales multiplied into the values on Vector they took 236.
"""

from __future__ import annotations

import nki
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.cache.create import create_cache
from nki_kernels.cache.nibble_pages import widen_pages_reference
from nki_kernels.cache.packed_pages import PageArguments
from nki_kernels.cache.scales import store_reference, use_reference
from nki_kernels.decode.arguments import DecodeStep, RankArguments
from nki_kernels.decode.attend import attend_share
from nki_kernels.decode.sizes import Sizes
from nki_kernels.norms.norm import create_rms_norm
from nki_kernels.precision import widened
from nki_kernels.rmsnorm import rmsnorm_reference
from nki_kernels.tiles import PARTITIONS, expect_dims

cores = (1, 2)

MAX_DEPTH = 512
MAX_QUERIES = 8192
MAX_NEW_WITH_SINKS = 96
"""New keys leave a quadrant of the partitions to the sinks."""


@nki.jit
def attention_decode(
    q,
    k_cache: nt.mutable_tensor,
    v_cache: nt.mutable_tensor,
    positions,
    scale,
    k=None,
    v=None,
    num_kv_heads=None,
    cos=None,
    sin=None,
    q_norm=None,
    k_norm=None,
    eps=1e-6,
    slots=None,
    block_tables=None,
    window=None,
    softcap=None,
    sinks=None,
    rope_positions=None,
    position_group=None,
    position_ranks=1,
    position_rank=None,
    cache_rows=None,
    k_scale=None,
    v_scale=None,
    k_pages=None,
    v_pages=None,
    newest_tables=None,
):
    """Compute the attention of a batch's new tokens over its caches and themselves.

    Returns (o [T, Hq * D] in q's dtype, k_cache, v_cache). New keys k and values v are written to the
    caches, after normalisation and rotation if asked. Without k and v the caches already hold them:
    nothing is written, and o alone is returned. The module docstring describes the arguments and limits;
    AssertionError if the arguments violate them.
    """
    stored = k is None
    expect_dims(2, q, "q [T, Hq * D]")
    ranks = RankArguments(position_group, position_ranks, position_rank)
    ranks.check()
    pages = PageArguments(k_pages, v_pages, newest_tables)
    if pages.is_given():
        check_packed(window, position_group, k_scale)
    cache = create_cache(k_cache, v_cache, slots, block_tables, cache_rows, q.shape[0], stored, pages)
    angle_rows = check_rope_positions(rope_positions, positions)
    step = DecodeStep(
        positions,
        angle_rows,
        scale,
        cos,
        sin,
        create_rms_norm(q_norm, eps),
        create_rms_norm(k_norm, eps),
        window,
        softcap,
        sinks,
    )
    sizes = compute_sizes((q, k, v), cache, step, num_kv_heads, position_ranks)
    check_tables(sizes.depth, step, stored)
    # Scales are loaded behind all checks, so that refused arguments issue no instruction.
    step.load_scales(k_scale, v_scale, cache)
    o = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    attend_share(o, (q, k, v), cache, sizes, step, ranks)
    if stored:
        return o
    return o, k_cache, v_cache


def compute_sizes(tokens, cache, step, num_kv_heads, ranks=1):
    """Return the `Sizes` of a decode step, or raise AssertionError if its arguments do not fit together.

    Args:
        tokens: (q, k, v) of the new tokens; k and v are None if the cache holds them already.
        step: `DecodeStep`, the other arguments of the kernel.
        num_kv_heads: the key/value heads that the caller expects in the caches, or None: any number.
        ranks: number of ranks that divide the positions of the caches.
    """
    q, k, v = tokens
    sizes = Sizes(q.shape[0], q.shape[1], q.dtype, cache, ranks, k is None)
    check_step(step, num_kv_heads, sizes, MAX_DEPTH)
    check_tokens(q, k, v, sizes)
    check_sizes(sizes)
    check_options(sizes, step)
    return sizes


def check_step(step, num_kv_heads, sizes, most_depth):
    """Raise AssertionError if heads, tokens or positions do not fit the caches.

    The head size has to be even and at most `most_depth`, the tokens a multiple of the sequences, positions
    [tokens, 1], and the scale positive. `num_kv_heads` is None or the number of the caches.
    """
    tokens, kv_heads, depth = sizes.tokens, sizes.kv_heads, sizes.depth
    assert num_kv_heads is None or num_kv_heads == kv_heads, (
        f"num_kv_heads is {num_kv_heads}, but the caches have {kv_heads} key/value heads: pass {kv_heads} or None"
    )
    assert depth <= most_depth and depth % 2 == 0, (
        f"a decode step takes an even head size of at most {most_depth} here, not {depth}"
    )
    assert tokens % sizes.sequences == 0, (
        f"{tokens} new tokens do not divide into {sizes.sequences} sequences: give each equally many"
    )
    positions = step.positions
    assert positions.shape == (tokens, 1), f"positions have to be [{tokens}, 1], not {positions.shape}"
    assert step.scale > 0, f"scale is {step.scale}; the exact maximum needs a positive one"


def check_tokens(q, k, v, sizes):
    """Raise AssertionError if q, k and v do not fit the caches' heads, or differ in rows or dtype; k, v may be None."""
    tokens, kv_heads, depth = sizes.tokens, sizes.kv_heads, sizes.depth
    assert (k is None) == (v is None), (
        "one of k and v is None: give both, or neither if the caches hold the new tokens already"
    )
    assert q.shape[1] % (kv_heads * depth) == 0, (
        f"q has {q.shape[1]} columns, no multiple of {kv_heads * depth}: give the query heads of {kv_heads} "
        f"key/value heads of {depth}"
    )
    if k is None:
        return
    expect_dims(2, k, "k [T, Hk * D]")
    assert k.shape == (tokens, kv_heads * depth), (
        f"k has to be [{tokens}, {kv_heads * depth}] for {kv_heads} heads of {depth}, not {k.shape}"
    )
    assert v.shape == k.shape, f"k is {k.shape}, v is {v.shape}; both need one shape"
    assert q.dtype == k.dtype and q.dtype == v.dtype, (
        f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; all three need one dtype"
    )


def check_tables(depth, step, stored=False):
    """Raise AssertionError if rotary tables or norms of heads come alone, or do not fit heads of `depth` elements.

    Args:
        step: `DecodeStep`, of which cos, sin, q_norm and k_norm are checked.
        stored: whether there are no new keys; then q_norm may come alone, and k_norm is refused.
    """
    cos, sin, q_norm, k_norm = step.cos, step.sin, step.q_norm, step.k_norm
    assert (cos is None) == (sin is None), (
        "one of cos and sin is None: give both, or neither if q and k are rotated already"
    )
    if cos is not None:
        assert cos.shape == sin.shape, f"cos is {cos.shape}, sin is {sin.shape}; both need one shape"
        assert 2 * cos.shape[1] <= depth, (
            f"cos and sin of width {cos.shape[1]} need heads of {2 * cos.shape[1]} elements, not {depth}"
        )
    if stored:
        assert k_norm is None, "k_norm is given without k: cached keys are normalised already, so pass None"
    else:
        assert (q_norm is None) == (k_norm is None), (
            "one of q_norm and k_norm is None: with new keys give both or neither"
        )
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            assert norm.weight.shape == (1, depth), f"{name} has to be [1, {depth}], not {norm.weight.shape}"


def check_rope_positions(rope_positions, positions):
    """Return [T, 1] int32 @ HBM: for each new token its row in the rotary tables `cos` and `sin`.

    That is `rope_positions`, or `positions` if they are None. AssertionError if the shapes of the two differ.
    """
    if rope_positions is None:
        return positions
    assert rope_positions.shape == positions.shape, (
        f"rope_positions have to be {positions.shape}, as positions, not {rope_positions.shape}"
    )
    return rope_positions


def check_options(sizes, step):
    """Raise AssertionError if window, softcap or sinks of a step make no sense.

    A window is at least 1, a cap positive, and sinks are [1, query heads of this rank]. With sinks a sequence
    has at most `MAX_NEW_WITH_SINKS` new tokens whose keys are written.
    """
    window, softcap, sinks = step.window, step.softcap, step.sinks
    assert window is None or window >= 1, (
        f"window is {window}; a token sees at least its own position: give 1 or more, or None"
    )
    assert softcap is None or softcap > 0, (
        f"softcap is {softcap}; scores are capped at a positive number: give one, or None"
    )
    if sinks is not None:
        assert sinks.shape == (1, sizes.local_heads), (
            f"sinks have to be [1, {sizes.local_heads}], not {sinks.shape}"
        )
        assert sizes.stored or sizes.new <= MAX_NEW_WITH_SINKS, (
            f"attention_decode takes at most {MAX_NEW_WITH_SINKS} new tokens of a sequence with sinks, "
            f"not {sizes.new}"
        )


def check_packed(window, position_group, k_scale):
    """Raise AssertionError if there is a window, a group of ranks that divide positions, or a static scale.

    Pages of 4 bits go with none of these.
    """
    assert window is None and position_group is None and k_scale is None, (
        "pages of 4 bits take no window, no position_group and no k_scale; leave these out"
    )


def check_sizes(sizes):
    """Raise AssertionError if a step has more heads, queries or positions than its tiles take.

    At most 128 query heads, 128 queries of a key/value head of a sequence, MAX_QUERIES heads of all tokens,
    and the positions whose keys and values fit into SBUF.
    """
    assert sizes.heads <= PARTITIONS, (
        f"attention_decode takes at most {PARTITIONS} query heads, not {sizes.heads}: use more ranks"
    )
    assert sizes.queries <= PARTITIONS, (
        f"attention_decode takes at most {PARTITIONS} new queries of a kv head, not {sizes.queries}: give a "
        "sequence fewer new tokens"
    )
    assert sizes.tokens * sizes.heads <= MAX_QUERIES, (
        f"attention_decode takes at most {MAX_QUERIES} heads of new tokens, not {sizes.tokens * sizes.heads}: "
        "launch fewer sequences at once"
    )
    assert sizes.capacity <= sizes.most_positions, (
        f"attention_decode takes caches of at most {sizes.most_positions} positions, not {sizes.capacity}"
    )


def attention_decode_reference(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    positions: np.ndarray,
    scale: float,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    num_kv_heads: int | None = None,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    q_norm: np.ndarray | None = None,
    k_norm: np.ndarray | None = None,
    eps: float = 1e-6,
    slots: np.ndarray | None = None,
    block_tables: np.ndarray | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    rope_positions: np.ndarray | None = None,
    position_group: object = None,
    position_ranks: int = 1,
    position_rank: np.ndarray | None = None,
    cache_rows: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    k_pages: np.ndarray | None = None,
    v_pages: np.ndarray | None = None,
    newest_tables: np.ndarray | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute o [T, Hq * D] with NumPy, by a float32 softmax over all visible positions, head by head.

    Returns (o in q's dtype, k_cache, v_cache); the caches are updated in place. Without k and v o alone is
    returned. The `position_*` arguments are not read: for ranks that divide positions pass the caches with
    all positions and the query heads of all ranks.
    """
    paged = block_tables is not None
    packed = None
    if k_pages is not None and v_pages is not None:
        packed = widen_pages_reference(k_pages, v_pages, q.dtype)
    tokens, (kv_heads, depth) = len(q), (k_cache.shape[2:] if paged else k_cache.shape[1:3])
    if cache_rows is not None:
        k_cache, v_cache = k_cache[cache_rows[:, 0]], v_cache[cache_rows[:, 0]]
    sequences = len(k_cache) if block_tables is None else len(block_tables)
    heads = []
    for rows, weight in ((q, q_norm), (k, k_norm)):
        if rows is None:
            continue
        head_rows = rows.reshape(-1, depth)
        if weight is not None:
            head_rows = rmsnorm_reference(head_rows, weight, eps)
        head_rows = widened(head_rows).reshape(tokens, -1, depth)
        if cos is not None and sin is not None:
            half = cos.shape[1]
            rows = positions if rope_positions is None else rope_positions
            cosines, sines = widened(cos)[rows], widened(sin)[rows]
            first, second, unrotated = np.split(head_rows, [half, 2 * half], axis=2)
            turned = first * cosines - second * sines, second * cosines + first * sines
            head_rows = np.concatenate([*turned, unrotated], axis=2)
        heads.append(head_rows.astype(q.dtype))
    scales = [scale if scale is None else scale.reshape(-1, 1, 1) for scale in (k_scale, v_scale)]
    fresh: tuple[np.ndarray, ...] = ()
    if v is not None:
        fresh = tuple(
            store_reference(rows.reshape(tokens, kv_heads, depth).swapaxes(0, 1), scale, k_cache.dtype)
            for rows, scale in zip((heads[1], v), scales)
        )
    outputs = []
    for token in range(tokens):
        sequence, new = token * sequences // tokens, tokens // sequences
        begin = sequence * new
        before = int(positions[begin, 0]) if fresh else int(positions[token, 0]) + 1
        if block_tables is None:
            cached = k_cache[sequence].swapaxes(1, 2), v_cache[sequence]
        else:
            pages = [cache[block_tables[sequence]] for cache in packed or (k_cache, v_cache)]
            if newest_tables is not None:
                earlier, newest = before // k_cache.shape[1], newest_tables[sequence, 0]
                pages = [
                    np.concatenate([full[:earlier], cache[[newest]].astype(full.dtype)])
                    for full, cache in zip(pages, (k_cache, v_cache))
                ]
            cached = tuple(rows.reshape(-1, kv_heads, depth).swapaxes(0, 1) for rows in pages)
        keys, values = (use_reference(old[:, :before], scale) for old, scale in zip(cached, scales))
        if fresh:
            keys, values = (
                np.concatenate([old, use_reference(new_rows[:, begin : token + 1], scale)], axis=1)
                for old, new_rows, scale in zip((keys, values), fresh, scales)
            )
        if window is not None:
            keys, values = keys[:, -window:], values[:, -window:]
        queries = widened(heads[0][token]).reshape(kv_heads, -1, depth)
        for head in range(kv_heads):
            scores = queries[head] @ keys[head].T
            scores = scores * scores.dtype.type(scale)
            if softcap is not None:
                scores = np.tanh(scores / scores.dtype.type(softcap)) * scores.dtype.type(softcap)
            if sinks is not None:
                scores = np.concatenate([scores, widened(sinks).reshape(kv_heads, -1, 1)[head]], axis=1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            outputs.append(weights[:, : keys.shape[1]] @ values[head])
    o = np.stack(outputs).reshape(q.shape).astype(q.dtype)
    if not fresh:
        return o
    for token in range(tokens):
        sequence, position = token * sequences // tokens, int(positions[token, 0])
        if slots is None:
            k_cache[sequence, :, :, position] = fresh[0][:, token]
            v_cache[sequence, :, position, :] = fresh[1][:, token]
        else:
            page, offset = divmod(int(slots[token, 0]), k_cache.shape[1])
            k_cache[page, offset], v_cache[page, offset] = fresh[0][:, token], fresh[1][:, token]
    return o, k_cache, v_cache

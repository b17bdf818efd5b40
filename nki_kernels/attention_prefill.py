"""attention_prefill: causal attention of a prompt with itself, and the caches filled with its keys and values.

    o[t, h] = sum over s <= t of softmax over s (scale * q[t, h] . k[s, g]) * v[s, g],   g = h // (Hq / Hk)

Dimensions
    T   tokens of the prompt; D head size; Hq query heads; Hk key/value heads, each serving Hq/Hk query heads;
    S   positions that the caches hold.

Arguments
    q             [T, Hq * D] @ HBM, float32 or bfloat16
    k, v          [T, Hk * D] @ HBM, q's dtype
    k_cache       [1, Hk, D, S] @ HBM, any float dtype; positions 0 … T-1 are written
    v_cache       [1, Hk, S, D] @ HBM, any float dtype; positions 0 … T-1 are written
    scale         compile-time float > 0, usually D ** -0.5
    num_kv_heads  compile-time int or None; Hk, as the caches have it
    returns o     [T, Hq * D] @ HBM, q's dtype, and the two caches

Layout
    Scores are [query, key]: queries on the partitions, so that the softmax runs along the free dim. For that, queries
    and keys are transposed to [D, t], which is also the layout of the key cache. The value cache has keys first, as
    the second product takes them. For that product the weights of the softmax are transposed to [key, query].

Tiling
    for each key/value head: its keys [D, T] and values [key, T/128, D] stay in SBUF
        for 128 queries, for each query head of the group
            for 512 keys up to the diagonal, with an online softmax: running maximum, sum and output are corrected
            when the maximum grows
    The causal mask is one tile, added to the 128 x 128 block on the diagonal; blocks above it are never computed.

Limits
    D up to 128; T up to S and up to 8192 (keys and values of one head in SBUF).

Cost
    HBM: q, k, o once, v twice (once straight into the cache), T rows of each cache once. Tensor engine: T^2 Hq D
    multiplications twice, half of them skipped, plus a transpose of the weights. Bound: the Tensor engine for long
    prompts, the chain of small instructions for short ones.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.precision import widened
from nki_kernels.softmax import exponentials, running_bias
from nki_kernels.tiles import BANK, MASKED, PARTITIONS, expect_dims, load, load_blocks, transposed

MAX_TOKENS = 8192


@nki.jit
def attention_prefill(
    q, k, v, k_cache: nt.mutable_tensor, v_cache: nt.mutable_tensor, scale, num_kv_heads=None
):
    """Causal attention of a prompt with itself; its keys and values are written to the caches."""
    check_heads(q, k, v, k_cache, v_cache, scale, num_kv_heads)
    tokens, width = q.shape
    _, kv_heads, depth, capacity = k_cache.shape
    assert tokens <= capacity, f"a prompt of {tokens} tokens does not fit into caches of {capacity} positions"
    assert tokens <= MAX_TOKENS, f"attention_prefill takes at most {MAX_TOKENS} tokens, not {tokens}"
    group = width // (kv_heads * depth)
    o = nl.ndarray((tokens, width), dtype=q.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=v_cache[0, :, 0:tokens, :], src=v.reshape((tokens, kv_heads, depth)).permute((1, 0, 2)))
    mask = causal_mask(min(tokens, PARTITIONS))
    for head in range(kv_heads):
        keys = transposed_keys(k[:, head * depth : (head + 1) * depth])
        nisa.dma_copy(dst=k_cache[0, head, :, 0:tokens], src=keys)
        values = load_blocks(v[:, head * depth : (head + 1) * depth], v.dtype)
        start = head * group * depth
        end = start + group * depth
        for first in range(0, tokens, PARTITIONS):
            last = min(tokens, first + PARTITIONS)
            queries = transposed(load(q[first:last, start:end], q.dtype), depth)
            result = nl.ndarray((last - first, group * depth), dtype=q.dtype, buffer=nl.sbuf)
            for member in range(group):
                attend(
                    result[:, member * depth : (member + 1) * depth],
                    queries[:, member, :],
                    keys,
                    values,
                    first,
                    mask,
                    scale,
                )
            nisa.dma_copy(dst=o[first:last, start:end], src=result)
    return o, k_cache, v_cache


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


def causal_mask(rows):
    """A tile [rows, rows] of 0 where key <= query and MASKED where key > query."""
    zeros = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)
    mask = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.affine_select(
        dst=mask,
        pattern=[[-1, rows]],
        channel_multiplier=1,
        on_true_tile=zeros,
        on_false_value=MASKED,
        cmp_op=nl.greater_equal,
    )
    return mask


def transposed_keys(k):
    """The keys of one head, [T, D] @ HBM, as [D, T] @ SBUF."""
    tokens, depth = k.shape
    rows = load_blocks(k, k.dtype)
    keys = nl.ndarray((depth, tokens), dtype=k.dtype, buffer=nl.sbuf)
    for start in range(0, tokens, BANK):
        end = min(tokens, start + BANK)
        bank = nl.ndarray((depth, end - start), dtype=k.dtype, buffer=nl.psum)
        for first in range(start, end, PARTITIONS):
            last = min(end, first + PARTITIONS)
            nisa.nc_transpose(
                dst=bank[:, first - start : last - start],
                data=rows[0 : last - first, first // PARTITIONS, :],
            )
        nisa.tensor_copy(dst=keys[:, start:end], src=bank)
    return keys


def attend(result, query, keys, values, first, mask, scale):
    """Attention of up to 128 queries [D, rows] of one head, from token `first` on, into result [rows, D].

    Online softmax over blocks of keys: when a block raises the running maximum, the sums so far are scaled down.
    """
    depth, rows = query.shape
    end = first + rows
    bias = None
    total = None
    output = None
    for start in range(0, end, BANK):
        stop = min(end, start + BANK)
        scores = nl.ndarray((rows, stop - start), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=scores, stationary=query, moving=keys[:, start:stop], accumulate=False)
        if stop == end:
            diagonal = scores[:, first - start : stop - start]
            nisa.tensor_tensor(dst=diagonal, data1=diagonal, data2=mask[0:rows, 0:rows], op=nl.add)
        new_bias = running_bias(scores, scale, bias)
        weights, block_total = exponentials(scores, scale, new_bias, query.dtype)
        product = weighted_values(weights, values, start // PARTITIONS)
        if bias is None:
            total = block_total
            output = product
            if stop < end:
                # Two operands of one instruction may not both lie in PSUM.
                output = nl.ndarray((rows, depth), dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_copy(dst=output, src=product)
        else:
            correction = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=correction, op=nl.exp, data=bias, bias=new_bias, scale=-1.0)
            scale_and_add(total, correction, block_total)
            scale_and_add(output, correction, product)
        bias = new_bias
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    nisa.tensor_scalar(dst=result, data=output, op0=nl.multiply, operand0=inverse)


def weighted_values(weights, values, first_block):
    """weights [rows, n] times values [key in block, block, D] from a block on: [rows, D] in PSUM."""
    rows, count = weights.shape
    by_key = transposed(weights)
    product = nl.ndarray((rows, values.shape[2]), dtype=nl.float32, buffer=nl.psum)
    for block in range(by_key.shape[1]):
        used = min(PARTITIONS, count - block * PARTITIONS)
        nisa.nc_matmul(
            dst=product,
            stationary=by_key[0:used, block, :],
            moving=values[0:used, first_block + block, :],
            accumulate=block > 0,
        )
    return product


def scale_and_add(tile, scale, addend):
    """tile = tile * scale + addend, with scale [rows, 1]."""
    nisa.scalar_tensor_tensor(
        dst=tile, data=tile, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=addend
    )


def attention_prefill_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    scale: float,
    num_kv_heads: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Softmax of the whole masked score matrix in float32; the caches are updated in place."""
    _, kv_heads, depth, _ = k_cache.shape
    tokens = q.shape[0]
    k_cache[0, :, :, :tokens] = k.reshape(tokens, kv_heads, depth).transpose(1, 2, 0)
    v_cache[0, :, :tokens, :] = v.reshape(tokens, kv_heads, depth).transpose(1, 0, 2)
    queries = widened(q).reshape(tokens, kv_heads, -1, depth)
    keys = widened(k).reshape(tokens, kv_heads, depth)
    values = widened(v).reshape(tokens, kv_heads, depth)
    scores = np.einsum("thgd,shd->hgts", queries, keys) * queries.dtype.type(scale)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    o = np.einsum("hgts,shd->thgd", weights, values)
    return o.reshape(q.shape).astype(q.dtype), k_cache, v_cache

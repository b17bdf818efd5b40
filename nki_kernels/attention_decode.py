"""attention_decode: attention of one new token with the caches, to which its key and value are written first.

    o[h] = sum over s <= position of softmax over s (scale * q[h] . k_cache[g, :, s]) * v_cache[g, s]
    with g = h // (Hq / Hk)

Dimensions
    D   head size; Hq query heads; Hk key/value heads; S positions that the caches hold.

Arguments
    q             [1, Hq * D] @ HBM, float32 or bfloat16
    k, v          [1, Hk * D] @ HBM, q's dtype
    k_cache       [1, Hk, D, S] @ HBM, any float dtype; finite everywhere; position `position` is written
    v_cache       [1, Hk, S, D] @ HBM, any float dtype; finite everywhere; position `position` is written
    position      [1, 1] @ HBM, int32, 0 <= position < S
    scale         compile-time float > 0, usually D ** -0.5
    num_kv_heads  compile-time int or None; Hk, as the caches have it
    returns o     [1, Hq * D] @ HBM, q's dtype, and the two caches

    The instructions do not depend on the value of `position`: it addresses two DMAs at run time and takes part in the
    mask, and all S positions are scored. So one compiled kernel serves every step.

Layout
    One token has too few rows for the engines, so all heads are computed together, heads on the partitions:
    scores [Hq, S]. One matmul contracts over (head, D) pairs of as many kv heads as fit on 128 partitions; the
    queries are laid out block diagonally, [(kv head, d), query head] with zeros for all other kv heads.
    Likewise the second product gives [Hq, (kv head, d)], of which each row keeps its own kv head's part.

Tiling
    for up to 2048 positions: scores of all heads from k_cache, plus the mask
    softmax over [Hq, S]; transpose the weights to [key, S/128, Hq]
    for kv heads that fill 2048 columns: the product with v_cache, all keys accumulating in PSUM

Limits
    D up to 128, Hq up to 128 (of this rank), S up to 8192.

Cost
    HBM: both caches once, and one row of each written; q, k, v and o once. Tensor engine: for each 512 positions one
    matmul per 128 (kv head, d) pairs, and S/128 * Hk D/512 for the second product. Bound: reading the caches.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.attention_prefill import check_heads
from nki_kernels.precision import widened
from nki_kernels.softmax import exponentials, running_bias
from nki_kernels.tiles import (
    ACCUMULATOR_BANKS,
    BANK,
    MASKED,
    PARTITIONS,
    blocks,
    cast,
    columns_at_once,
    load,
    load_repeated,
    multiply,
    transposed,
)

MAX_POSITIONS = 8192


@nki.jit
def attention_decode(
    q, k, v, k_cache: nt.mutable_tensor, v_cache: nt.mutable_tensor, position, scale, num_kv_heads=None
):
    """Attention of one new token with the caches, to which its key and value are written first."""
    check_heads(q, k, v, k_cache, v_cache, scale, num_kv_heads)
    _, kv_heads, depth, capacity = k_cache.shape
    assert q.shape[0] == 1, f"attention_decode takes one token, not {q.shape[0]}"
    assert position.shape == (1, 1), f"position is [1, 1], not {position.shape}"
    assert capacity <= MAX_POSITIONS, (
        f"attention_decode takes caches of at most {MAX_POSITIONS}, not {capacity}"
    )
    heads = q.shape[1] // depth
    assert heads <= PARTITIONS, f"attention_decode takes at most {PARTITIONS} query heads, not {heads}"
    o = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)

    write_row(k, v, k_cache[0], v_cache[0], load(position, nl.int32))
    mask = later_positions(position, heads, capacity)
    queries, height = block_diagonal_queries(q.reshape((heads, depth)), kv_heads)
    scores = nl.ndarray((heads, capacity), dtype=nl.float32, buffer=nl.sbuf)
    keys = k_cache[0].reshape((kv_heads * depth, capacity))
    step = columns_at_once(heads)
    for first in range(0, capacity, step):
        last = min(capacity, first + step)
        sums = multiply(queries, keys[:, first:last], height)
        nisa.tensor_tensor(dst=scores[:, first:last], data1=sums[0], data2=mask[:, first:last], op=nl.add)

    weights, inverse = softmax(scores, scale, q.dtype)
    weights_by_key = transposed(weights)
    values = v_cache[0].permute((1, 0, 2))
    together = max(1, BANK * ACCUMULATOR_BANKS // depth)
    group = heads // kv_heads
    for first in range(0, kv_heads, together):
        last = min(kv_heads, first + together)
        sums = multiply(weights_by_key, values[:, first:last, :])
        result = own_part(sums[0], inverse, first, last - first, group, q.dtype)
        rows = o.reshape((heads, depth))[first * group : last * group, :]
        nisa.dma_copy(dst=rows, src=result[first * group : last * group, :])
    return o, k_cache, v_cache


def write_row(k, v, k_cache, v_cache, position):
    """Store the new token's keys and values at a position that is read at run time from a [1, 1] tile."""
    kv_heads, depth, capacity = k_cache.shape
    nisa.dma_copy(
        dst=k_cache.ap(
            pattern=[[depth * capacity, kv_heads], [capacity, depth]], scalar_offset=position, indirect_dim=2
        ),
        src=k.reshape((kv_heads, depth)),
    )
    nisa.dma_copy(
        dst=v_cache.ap(
            pattern=[[capacity * depth, kv_heads], [1, depth]], scalar_offset=position, indirect_dim=1
        ),
        src=v.reshape((kv_heads, depth)),
    )


def later_positions(position, rows, capacity):
    """A tile [rows, capacity] of 0 up to the position and MASKED after it."""
    limit = cast(load_repeated(position, rows), nl.float32)
    mask = nl.ndarray((rows, capacity), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=mask, pattern=[[1, capacity]])
    nisa.tensor_scalar(dst=mask, data=mask, op0=nl.greater, operand0=limit, op1=nl.multiply, operand1=MASKED)
    return mask


def block_diagonal_queries(q, kv_heads):
    """Queries [heads, D] @ HBM as blocks [(kv head, d), block, head], zero where the kv head is not the head's own.

    Returns the tile and its rows per block: D times the kv heads that fit on the partitions. A transpose of the
    queries repeated along the free dim puts a copy of q[head, :] beside every kv head. Row p of block b belongs to
    kv head n where 0 <= p + b * height - D * n < D; two affine selections keep those.
    """
    heads, depth = q.shape
    together = min(kv_heads, PARTITIONS // depth)
    height = together * depth
    count = blocks(kv_heads, together)
    rows = load(q, q.dtype)
    bank = nl.ndarray((height, heads), dtype=q.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=rows.reshape((heads, 1, depth)).broadcast(1, together))
    repeated = nl.ndarray((height, 1, heads), dtype=q.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=repeated, src=bank)
    if kv_heads == 1:
        return repeated, height
    pattern = [[height, count], [-depth, kv_heads], [0, heads // kv_heads]]
    result = nl.ndarray((height, count, heads), dtype=q.dtype, buffer=nl.sbuf)
    nisa.affine_select(
        dst=result,
        pattern=pattern,
        channel_multiplier=1,
        on_true_tile=repeated.broadcast(1, count),
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )
    nisa.affine_select(
        dst=result,
        pattern=pattern,
        channel_multiplier=1,
        offset=1 - depth,
        on_true_tile=result,
        on_false_value=0.0,
        cmp_op=nl.less_equal,
    )
    return result, height


def softmax(scores, scale, dtype):
    """exp(scale * (scores - their maximum)) for each row in `dtype`, and the inverse of its sum [rows, 1]."""
    weights, total = exponentials(scores, scale, running_bias(scores, scale), dtype)
    inverse = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    return weights, inverse


def own_part(product, inverse, first, count, group, dtype):
    """Of a product [heads, (kv head, d)] over `count` kv heads from `first` on, each head's own part [heads, D].

    Head h belongs to kv head n where 0 <= h - group * (first + n) < group. The others are set to zero, so
    the sum over kv heads is the part that was kept; rows of heads with none of these kv heads become zero.
    """
    heads, columns = product.shape
    depth = columns // count
    whole = nl.ndarray((heads, count, depth), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=whole, data=product, op0=nl.multiply, operand0=inverse)
    pattern = [[-group, count], [0, depth]]
    nisa.affine_select(
        dst=whole,
        pattern=pattern,
        channel_multiplier=1,
        offset=-group * first,
        on_true_tile=whole,
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )
    nisa.affine_select(
        dst=whole,
        pattern=pattern,
        channel_multiplier=1,
        offset=1 - group - group * first,
        on_true_tile=whole,
        on_false_value=0.0,
        cmp_op=nl.less_equal,
    )
    result = nl.ndarray((heads, depth), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=result, op=nl.add, data=whole.permute((0, 2, 1)), axis=2)
    return result


def attention_decode_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    position: np.ndarray,
    scale: float,
    num_kv_heads: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Softmax over the positions up to the new one, head by head, in float32; the caches are updated in place."""
    _, kv_heads, depth, _ = k_cache.shape
    here = int(position[0, 0])
    k_cache[0, :, :, here] = k.reshape(kv_heads, depth)
    v_cache[0, :, here, :] = v.reshape(kv_heads, depth)
    queries = widened(q).reshape(kv_heads, -1, depth)
    outputs = []
    for head in range(kv_heads):
        scores = queries[head] @ widened(k_cache[0, head, :, : here + 1]) * queries.dtype.type(scale)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        outputs.append(weights @ widened(v_cache[0, head, : here + 1]))
    return np.stack(outputs).reshape(q.shape).astype(q.dtype), k_cache, v_cache

"""head_per_lane: decode attention with one query head on each partition. The first rung of the ladder.

    o[b, h] = sum over s <= positions[b] of softmax over s (scale * q[b, h] . k_cache[b, :, s]) * v_cache[b, s]

Dimensions:
    B   sequences, one new token of each; G query heads on one key/value head; S positions, a multiple of 128; D = 128.

Arguments:
    q          [B, G * D] @ HBM, float32 or bfloat16
    k_cache    [B, D, S] @ HBM, q's dtype; the new token's key is in it
    v_cache    [B, S, D] @ HBM, q's dtype; finite everywhere
    positions  [B, 1] @ HBM, int32: the last position that a sequence attends to
    scale      compile-time float > 0
    returns o  [B, G * D] @ HBM, q's dtype

Layout
    Scores are [head, S]: the softmax runs along the free dim, and uses G of 128 partitions. Its weights are
    transposed, 128 keys at a time, for the product with the values.

Tiling
    for each sequence: load its keys and values; 512 scores per nc_matmul; softmax over S; S/128 transposes and products

Cost
    HBM: both caches once. Bound: the Vector and Scalar engines, which pass over S elements of each head one lane at a
    time while 124 of 128 lanes idle, and the chain from one to the next.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.ladder.decode.steps import (
    BANK,
    LOWEST,
    PARTITIONS,
    expect_whole_tiles,
    load,
    load_transposed_queries,
)


@nki.jit
def head_per_lane(q, k_cache, v_cache, positions, scale):
    """Return decode attention o [B, G * D] in q's dtype in shared HBM, one sequence after another.

    Scores have a head on each partition. The module docstring describes the arguments; AssertionError unless
    D is 128 and S a multiple of 128.
    """
    sequences, heads, capacity = expect_whole_tiles(q, k_cache, v_cache, positions)
    o = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    indices = nl.ndarray((heads, capacity), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=indices, pattern=[[1, capacity]])
    for sequence in range(sequences):
        queries = load_transposed_queries(q, sequence, sequence + 1, heads)
        keys = load(k_cache[sequence])
        scores = nl.ndarray((heads, capacity), dtype=nl.float32, buffer=nl.sbuf)
        for first in range(0, capacity, BANK):
            last = min(capacity, first + BANK)
            bank = nl.ndarray((heads, last - first), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(dst=bank, stationary=queries, moving=keys[:, first:last], accumulate=False)
            nisa.tensor_copy(dst=scores[:, first:last], src=bank)
        weights, inverse = compute_softmax(
            scores, indices, load_last_position(positions, sequence, heads), scale, q.dtype
        )
        result = nl.ndarray((heads, PARTITIONS), dtype=q.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=result, data=weigh_values(weights, v_cache[sequence]), op0=nl.multiply, operand0=inverse
        )
        nisa.dma_copy(dst=o.reshape((sequences, heads, PARTITIONS))[sequence], src=result)
    return o


def load_last_position(positions, sequence, heads):
    """Load the position of one sequence onto a partition for each head: [heads, 1] float32 in SBUF.

    sequence: index of the sequence in `positions` [B, 1] @ HBM.
    """
    number = nl.ndarray((heads, 1), dtype=positions.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=number, src=positions.ap(pattern=[[0, heads], [1, 1]], offset=sequence))
    result = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=number)
    return result


def compute_softmax(scores, indices, last, scale, dtype):
    """Return the weights of a softmax, not yet divided by their sum, and 1 / sum [heads, 1] float32, both in SBUF.

    The weights are exp(scale * (score - maximum of the head)) in `dtype`, 0 for positions after `last`.

    Args:
        scores: [heads, S] float32 in SBUF; overwritten.
        indices: [heads, S] float32, the position of each column.
        last: [heads, 1] float32, the last position that counts.
    """
    heads = scores.shape[0]
    mask = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=mask, data=indices, op0=nl.greater, operand0=last, op1=nl.multiply, operand1=LOWEST / 2
    )
    nisa.tensor_tensor(dst=scores, data1=scores, data2=mask, op=nl.add)
    most = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=most, op=nl.maximum, data=scores, axis=1, negate=True)
    bias = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=bias, data=most, op0=nl.multiply, operand0=scale)
    weights = nl.ndarray(scores.shape, dtype=dtype, buffer=nl.sbuf)
    total = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=weights,
        op=nl.exp,
        data=scores,
        bias=bias,
        scale=scale,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    inverse = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    return weights, inverse


def weigh_values(weights, values):
    """Multiply weights [heads, S] in SBUF by values [S, D] in HBM: return [heads, D] float32 in PSUM."""
    heads, capacity = weights.shape
    product = nl.ndarray((heads, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
    tile = load(values.reshape_dim(0, (capacity // PARTITIONS, PARTITIONS)).permute((1, 0, 2)))
    for chunk in range(capacity // PARTITIONS):
        bank = nl.ndarray((PARTITIONS, heads), dtype=weights.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=weights[:, chunk * PARTITIONS : (chunk + 1) * PARTITIONS])
        by_key = nl.ndarray((PARTITIONS, heads), dtype=weights.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=by_key, src=bank)
        nisa.nc_matmul(dst=product, stationary=by_key, moving=tile[:, chunk, :], accumulate=chunk > 0)
    return product

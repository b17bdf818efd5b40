"""Attention of one token with its cache in tiles of 128 positions: one pass for the maxima, one for the sums.

Queries are [d, heads] and keys [d, S]; values are a list of tiles [128, d]. All are in SBUF, and d is 128.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, broadcast, constant, evacuate, ones_row, psum, sbuf


def attend_in_tiles(out, query, keys, values, again=False):
    """Set `out` [d, heads] to softmax(query^T keys) times the values, for a few heads together.

    Scores have the positions on the partitions, and are transposed to find the maximum over positions. again: the
    second pass computes the scores again instead of keeping those of the first.
    """
    heads = query.shape[1]
    largest = sbuf((heads, 1), nl.float32)
    nisa.memset(dst=largest, value=-1.0e9)
    kept = []
    for i in range(len(values)):
        scores = evacuate(_scores(keys, query, i), nl.float32)
        kept.append(scores)
        turned = psum((heads, PARTITIONS))
        nisa.nc_transpose(dst=turned, data=scores)
        one = sbuf((heads, 1), nl.float32)
        nisa.tensor_reduce(dst=one, op=nl.maximum, data=turned, axis=1)
        nisa.tensor_tensor(dst=largest, data1=largest, data2=one, op=nl.maximum)
    row = psum((1, heads))
    nisa.nc_transpose(dst=row, data=largest)
    wide = evacuate(broadcast(evacuate(row, nl.float32), ones_row(nl.float32)), nl.float32)
    product, total = psum((PARTITIONS, heads)), psum((PARTITIONS, heads))
    ones = constant((PARTITIONS, PARTITIONS), 1.0)
    for i in range(len(values)):
        scores = _scores(keys, query, i) if again else kept[i]
        weights = _weights(scores, wide, query.dtype)
        nisa.nc_matmul(dst=total, stationary=ones, moving=evacuate(weights, nl.float32), accumulate=i > 0)
        nisa.nc_matmul(dst=product, stationary=values[i], moving=weights, accumulate=i > 0)
    _divided(out, product, total)


def attend_by_heads(out, query, keys, values, summed_by_trips=False):
    """Set `out` [d, heads] to the attention output, head by head with a running maximum.

    The maximum of each tile goes through HBM to reach all partitions. Earlier sums are not rescaled when the maximum
    grows. summed_by_trips: sums go through HBM too, instead of being matmuls with ones.
    """
    for head in range(query.shape[1]):
        one = query[:, head : head + 1]
        product, total = psum((PARTITIONS, 1)), psum((PARTITIONS, 1))
        ones = constant((PARTITIONS, PARTITIONS), 1.0)
        largest = sbuf((PARTITIONS, 1), nl.float32)
        nisa.memset(dst=largest, value=-1.0e9)
        sums = sbuf((PARTITIONS, 1), nl.float32)
        nisa.memset(dst=sums, value=0.0)
        for i in range(len(values)):
            scores = evacuate(_scores(keys, one, i), nl.float32)
            nisa.tensor_tensor(
                dst=largest, data1=largest, data2=reduced_by_trip(scores, nl.maximum), op=nl.maximum
            )
            weights = _weights(scores, largest, query.dtype)
            wide = evacuate(weights, nl.float32)
            if summed_by_trips:
                nisa.tensor_tensor(dst=sums, data1=sums, data2=reduced_by_trip(wide, nl.add), op=nl.add)
            else:
                nisa.nc_matmul(dst=total, stationary=ones, moving=wide, accumulate=i > 0)
            nisa.nc_matmul(dst=product, stationary=values[i], moving=weights, accumulate=i > 0)
        _divided(out[:, head : head + 1], product, sums if summed_by_trips else total)


def reduced_by_trip(column, op):
    """Return the reduction of a column [128, 1] over the partitions, on every partition of a new SBUF tile [128, 1].

    The column is transposed, reduced with `op`, stored to HBM and loaded on every partition.
    """
    turned, one = psum((1, PARTITIONS)), sbuf((1, 1), nl.float32)
    nisa.nc_transpose(dst=turned, data=column)
    nisa.tensor_reduce(dst=one, op=op, data=turned, axis=1)
    scratch = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=scratch, src=one)
    wide = sbuf((PARTITIONS, 1), nl.float32)
    nisa.dma_copy(dst=wide, src=scratch.ap(pattern=[[0, PARTITIONS], [1, 1]]))
    return wide


def _scores(keys, query, i):
    """Return the scores [128, heads] in PSUM of the queries with tile `i` of the keys."""
    bank = psum((PARTITIONS, query.shape[1]))
    nisa.nc_matmul(dst=bank, stationary=keys[:, i * PARTITIONS : (i + 1) * PARTITIONS], moving=query)
    return bank


def _weights(scores, largest, dtype):
    """Return exp(scores - largest) as a new SBUF tile of `dtype`; `largest` has the shape of the scores."""
    centred, weights = sbuf(scores.shape, nl.float32), sbuf(scores.shape, dtype)
    nisa.tensor_tensor(dst=centred, data1=scores, data2=largest, op=nl.subtract)
    nisa.activation(dst=weights, op=nl.exp, data=centred)
    return weights


def _divided(out, product, total):
    """Set `out` to product / total, both in PSUM or SBUF and of the shape of `out`."""
    inverse = sbuf(out.shape, nl.float32)
    nisa.reciprocal(dst=inverse, data=total)
    nisa.tensor_tensor(dst=out, data1=product, data2=inverse, op=nl.multiply)

"""Attention over a whole prompt without a mask; inputs are [d, tokens] in HBM, with the head dimension first.

`mode` is the dge_mode of the DMAs. The number of tokens is a multiple of 512, and d is at most 128.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import BANK, PARTITIONS, evacuate, load, psum, sbuf, store


def three_pass(q, k, v, mode="none"):
    """Return softmax(q^T k) v^T [tokens, d] of one head, in three loops over rows of q with intermediates in HBM.

    The first loop stores the scores to HBM, the second their softmax, the third multiplies it by the values.
    """
    depth, tokens = q.shape
    output = nl.ndarray((tokens, depth), dtype=q.dtype, buffer=nl.shared_hbm)
    scores = nl.ndarray((tokens, tokens), dtype=nl.float32, buffer=nl.private_hbm)
    weights = nl.ndarray((tokens, tokens), dtype=nl.float32, buffer=nl.private_hbm)
    queries, keys, values = load(q, mode), load(k, mode), load(v, mode)
    for row in range(0, tokens, PARTITIONS):
        tile = _scores(queries[:, row : row + PARTITIONS], keys)
        store(scores[row : row + PARTITIONS, :], tile, mode)
    for row in range(0, tokens, PARTITIONS):
        tile = load(scores[row : row + PARTITIONS, :], mode)
        exponentials, inverse = _softmax(tile)
        for column in range(0, tokens, BANK):
            columns_view = exponentials[:, column : column + BANK]
            nisa.tensor_scalar(
                dst=columns_view,
                data=columns_view,
                op0=nl.multiply,
                operand0=inverse,
                engine=nisa.vector_engine,
            )
        store(weights[row : row + PARTITIONS, :], exponentials, mode)
    by_key = _transposed(values)
    for row in range(0, tokens, PARTITIONS):
        tile = load(weights[row : row + PARTITIONS, :], mode)
        bank = _weighted(_transposed(tile), by_key, depth)
        store(output[row : row + PARTITIONS, :], evacuate(bank, q.dtype), mode)
    return output


def fused(q, k, v, mode="none", narrow=False):
    """Return softmax(q^T k) v^T [tokens, d] of one head, in one loop over rows of q; scores and weights stay in SBUF.

    Rows are divided by the sum of their exponentials after the product with the values. narrow: the exponentials are
    bfloat16, else float32.
    """
    depth, tokens = q.shape
    output = nl.ndarray((tokens, depth), dtype=q.dtype, buffer=nl.shared_hbm)
    queries, keys, values = load(q, mode), load(k, mode), load(v, mode)
    by_key = _transposed(values)
    for row in range(0, tokens, PARTITIONS):
        tile = _scores(queries[:, row : row + PARTITIONS], keys)
        exponentials, inverse = _softmax(tile, nl.bfloat16 if narrow else nl.float32)
        bank = _weighted(_transposed(exponentials), by_key, depth)
        result = sbuf((PARTITIONS, depth), q.dtype)
        nisa.tensor_scalar(
            dst=result, data=bank, op0=nl.multiply, operand0=inverse, engine=nisa.vector_engine
        )
        store(output[row : row + PARTITIONS, :], result, mode)
    return output


def grouped(q, k, v, scale):
    """Return grouped-query attention [heads, tokens, d] of q [tokens, heads, d] and of k and v [tokens, kv heads, d].

    A whole row of scores is kept in SBUF. Tiles of q and k are transposed on the Tensor engine; weights are divided by
    their sum before they are transposed.
    """
    tokens, heads, depth = q.shape
    groups = k.shape[1]
    output = nl.ndarray((heads, tokens, depth), dtype=q.dtype, buffer=nl.shared_hbm)
    for group in range(groups):
        keys = sbuf((depth, tokens), k.dtype)
        values = []
        for row in range(0, tokens, PARTITIONS):
            bank = psum((depth, PARTITIONS), k.dtype)
            nisa.nc_transpose(dst=bank, data=load(k[row : row + PARTITIONS, group, :]))
            nisa.activation(dst=keys[:, row : row + PARTITIONS], op=nl.copy, data=bank)
            values.append(load(v[row : row + PARTITIONS, group, :]))
        for head in range(group * heads // groups, (group + 1) * heads // groups):
            for row in range(0, tokens, PARTITIONS):
                bank = psum((depth, PARTITIONS), q.dtype)
                nisa.nc_transpose(dst=bank, data=load(q[row : row + PARTITIONS, head, :]))
                tile = _scores(evacuate(bank, q.dtype), keys, scale)
                exponentials, inverse = _softmax(tile)
                for column in range(0, tokens, BANK):
                    columns_view = exponentials[:, column : column + BANK]
                    nisa.tensor_scalar(dst=columns_view, data=columns_view, op0=nl.multiply, operand0=inverse)
                result = evacuate(_weighted(_transposed(exponentials), values, depth), q.dtype)
                nisa.dma_copy(dst=output[head, row : row + PARTITIONS, :], src=result)
    return output


def _scores(query, keys, scale=None):
    """Return query^T keys, times `scale` if given, in SBUF: float32 [128, tokens].

    Query is [d, 128], keys are [d, tokens].
    """
    tokens = keys.shape[1]
    tile = sbuf((PARTITIONS, tokens), nl.float32)
    for column in range(0, tokens, BANK):
        bank = psum((PARTITIONS, BANK))
        nisa.nc_matmul(dst=bank, stationary=query, moving=keys[:, column : column + BANK])
        columns_view = tile[:, column : column + BANK]
        if scale is None:
            nisa.activation(dst=columns_view, op=nl.copy, data=bank)
        else:
            nisa.tensor_scalar(dst=columns_view, data=bank, op0=nl.multiply, operand0=scale)
    return tile


def _softmax(tile, dtype=nl.float32):
    """Return exp(row - max) [128, columns] and 1 / its row sums [128, 1] in SBUF, computed in chunks of 512 columns.

    The exponentials have `dtype`, and the reciprocals are float32; `tile` is not changed.
    """
    columns = tile.shape[1]
    count = columns // BANK
    maxima = sbuf((PARTITIONS, count), nl.float32)
    for i in range(count):
        columns_view = tile[:, i * BANK : (i + 1) * BANK]
        nisa.tensor_reduce(dst=maxima[:, i : i + 1], op=nl.maximum, data=columns_view, axis=1)
    bias = sbuf((PARTITIONS, 1), nl.float32)
    nisa.tensor_reduce(dst=bias, op=nl.maximum, data=maxima, axis=1, negate=True)
    exponentials = sbuf(tile.shape, dtype)
    sums = sbuf((PARTITIONS, count), nl.float32)
    for i in range(count):
        columns_view = exponentials[:, i * BANK : (i + 1) * BANK]
        nisa.activation(dst=columns_view, op=nl.exp, data=tile[:, i * BANK : (i + 1) * BANK], bias=bias)
        nisa.tensor_reduce(dst=sums[:, i : i + 1], op=nl.add, data=columns_view, axis=1)
    total = sbuf((PARTITIONS, 1), nl.float32)
    nisa.tensor_reduce(dst=total, op=nl.add, data=sums, axis=1)
    inverse = sbuf((PARTITIONS, 1), nl.float32)
    nisa.reciprocal(dst=inverse, data=total)
    return exponentials, inverse


def _transposed(tile):
    """Return the transposes of a tile's blocks of 128 columns, as SBUF tiles [128, rows of the tile]."""
    out = []
    for column in range(0, tile.shape[1], PARTITIONS):
        bank = psum((PARTITIONS, tile.shape[0]), tile.dtype)
        nisa.nc_transpose(dst=bank, data=tile[:, column : column + PARTITIONS])
        out.append(evacuate(bank, tile.dtype))
    return out


def _weighted(by_key, values, depth):
    """Return the sum over i of by_key[i]^T values[i] in PSUM: [128, depth] float32.

    by_key[i] are transposed weights [128 keys, 128 queries]; a value tile of another dtype is converted first.
    """
    bank = psum((PARTITIONS, depth))
    for i in range(len(by_key)):
        value = values[i]
        if value.dtype != by_key[i].dtype:
            value = sbuf(values[i].shape, by_key[i].dtype)
            nisa.tensor_copy(dst=value, src=values[i])
        nisa.nc_matmul(dst=bank, stationary=by_key[i], moving=value, accumulate=i > 0)
    return bank

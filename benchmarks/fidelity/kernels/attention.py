"""Attention of whole prompts without a mask, inputs [d, tokens] with the head on the partitions."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import BANK, PARTITIONS, evacuate, load, psum, sbuf, store


def three_pass(q, k, v, mode="none"):
    """Scores to HBM, softmax of HBM to HBM, weighted values from HBM: three loops over the rows of q."""
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
    """One loop over the rows of q: scores, softmax and weighted values stay on chip; the division comes last.

    narrow: the exponentials are bfloat16, whatever the inputs are.
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
    """Attend with grouped queries, a whole row of scores kept: q [tokens, heads, d], k and v [tokens, kv heads, d].

    Tiles of q and k are transposed on the Tensor engine; weights are divided before they are transposed.
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
    """exp(row - max) and 1 / its sum, in parts of 512 columns."""
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
    out = []
    for column in range(0, tile.shape[1], PARTITIONS):
        bank = psum((PARTITIONS, tile.shape[0]), tile.dtype)
        nisa.nc_transpose(dst=bank, data=tile[:, column : column + PARTITIONS])
        out.append(evacuate(bank, tile.dtype))
    return out


def _weighted(by_key, values, depth):
    bank = psum((PARTITIONS, depth))
    for i in range(len(by_key)):
        value = values[i]
        if value.dtype != by_key[i].dtype:
            value = sbuf(values[i].shape, by_key[i].dtype)
            nisa.tensor_copy(dst=value, src=values[i])
        nisa.nc_matmul(dst=bank, stationary=by_key[i], moving=value, accumulate=i > 0)
    return bank

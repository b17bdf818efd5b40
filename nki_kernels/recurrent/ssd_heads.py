"""Tiles whose columns are the elements of heads, side by side, and factors of heads."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def by_head(factors, depth):
    """Factors [row, head] seen as [row, head, element]."""
    return factors.expand_dim(2).broadcast(2, depth)


def in_heads(rows, depth):
    """Rows [row, head * element] seen as [row, head, element]."""
    return rows.reshape_dim(1, (rows.shape[1] // depth, depth))


def scaled(rows, factors, depth, dtype):
    """Each head of rows [row, head * element] times its factor [row, head], on GpSimd."""
    result = nl.ndarray(rows.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=in_heads(result, depth),
        data1=in_heads(rows, depth),
        data2=by_head(factors, depth),
        op=nl.multiply,
        engine=nisa.engine.gpsimd,
    )
    return result


def exponential(data, dtype=nl.float32):
    """exp of every element of a tile."""
    result = nl.ndarray(data.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=data)
    return result


def filled(shape, value):
    """A tile of float32 with one value."""
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=result, value=value)
    return result

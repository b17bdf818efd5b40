"""Tiles whose columns are the elements of heads, side by side, and factors of heads."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def by_head(factors, depth):
    """Return a view of factors [row, head] as [row, head, element]."""
    return factors.expand_dim(2).broadcast(2, depth)


def in_heads(rows, depth):
    """Return a view of rows [row, head * element] as [row, head, element]."""
    return rows.reshape_dim(1, (rows.shape[1] // depth, depth))


def scale_heads(dst, rows, factors, depth):
    """Write heads of rows [row, head * element] times their factors [row, head] to dst, on GpSimd."""
    nisa.tensor_tensor(
        dst=in_heads(dst, depth),
        data1=in_heads(rows, depth),
        data2=by_head(factors, depth),
        op=nl.multiply,
        engine=nisa.engine.gpsimd,
    )


def scaled(rows, factors, depth, dtype):
    """Return heads of rows [row, head * element] times their factors [row, head], on GpSimd."""
    result = nl.ndarray(rows.shape, dtype=dtype, buffer=nl.sbuf)
    scale_heads(result, rows, factors, depth)
    return result


def exponential(data, dtype=nl.float32):
    """Return exp of every element of a tile."""
    result = nl.ndarray(data.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=data)
    return result

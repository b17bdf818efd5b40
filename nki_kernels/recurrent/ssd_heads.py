"""Tiles whose columns are the elements of heads, side by side, and factors of heads.

`ssd` has heads of P elements (depth): column head * P + p of a row is element p of a head.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def repeat_for_elements(factors, depth):
    """Return a view of factors [row, head], repeated for each of `depth` elements: [row, head, element]."""
    return factors.expand_dim(2).broadcast(2, depth)


def view_heads(rows, depth):
    """Return a view of rows [row, head * element] as [row, head, element], with `depth` elements of each head."""
    return rows.reshape_dim(1, (rows.shape[1] // depth, depth))


def scale_heads(dst, rows, factors, depth):
    """Write rows [row, head * element] times factors [row, head] to dst [row, head * element]; GpSimd multiplies."""
    nisa.tensor_tensor(
        dst=view_heads(dst, depth),
        data1=view_heads(rows, depth),
        data2=repeat_for_elements(factors, depth),
        op=nl.multiply,
        engine=nisa.engine.gpsimd,
    )


def scale_rows(rows, factors, depth, dtype):
    """Return rows [row, head * element] times factors [row, head], a new SBUF tile of a dtype; GpSimd multiplies."""
    result = nl.ndarray(rows.shape, dtype=dtype, buffer=nl.sbuf)
    scale_heads(result, rows, factors, depth)
    return result


def compute_exponential(data, dtype=nl.float32):
    """Return exp of every element of a tile, a new SBUF tile of a dtype; the Scalar engine computes it."""
    result = nl.ndarray(data.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=data)
    return result

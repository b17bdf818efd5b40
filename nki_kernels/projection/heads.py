"""What is done to the heads of queries, keys and values when they leave PSUM: scale, bias, norm per head, rotation.

A row tile [rows, heads * D] has tokens on the partitions and heads along the free dim; q, k and v are column ranges of
one wide matrix [q | k | v].
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.rows import inverse_root
from nki_kernels.rope import rotate


def finish(result, sums, panels, scale, bias, turned, rotated, norms, tables, head, eps):
    """Columns of a row tile from PSUM into `result` [rows, columns], scaled, biased, normalised and rotated.

    sums: PSUM tiles that hold `panels`, ranges of columns. scale: [rows, 1] or None. bias: [rows, columns] or None.
    turned: the number of leading columns, whole heads of `head` elements, that are normalised or rotated.
    rotated: the number of leading columns that tables rotate.
    norms: (start, end, weight [rows, head] or None) of column ranges. tables: cosines and sines [rows, R/2], or None.
    """
    rows = result.shape[0]
    wide = result
    if turned > 0:
        wide = nl.ndarray((rows, turned), dtype=nl.float32, buffer=nl.sbuf)
    for panel in range(len(panels)):
        start, end = panels[panel]
        middle = max(start, min(end, turned))
        if middle > start:
            scaled(wide, start, middle, sums[panel][:, 0 : middle - start], scale, bias, panel % 2 == 0)
        if end > middle:
            scaled(
                result, middle, end, sums[panel][:, middle - start : end - start], scale, bias, panel % 2 == 0
            )
    for start, end, weight in norms:
        normalise_heads(wide[:, start:end], weight, head, eps)
    copied = 0
    if rotated > 0 and tables is not None:
        rotate(result[:, 0:rotated], wide[:, 0:rotated], tables[0], tables[1], head)
        copied = rotated
    if copied < turned:
        nisa.tensor_copy(dst=result[:, copied:turned], src=wide[:, copied:turned])


def scaled(target, start, end, source, scale, bias, by_scalar):
    """Columns start … end of `target` from PSUM, times one number for each row, plus the bias of each column.

    Without a bias the Scalar engine can do it as well as the Vector engine.
    """
    part = target[:, start:end]
    if bias is None and by_scalar:
        nisa.activation(dst=part, op=nl.copy, data=source, scale=scale if scale is not None else 1.0)
    elif bias is None and scale is None:
        nisa.tensor_copy(dst=part, src=source)
    elif bias is None:
        nisa.tensor_scalar(dst=part, data=source, op0=nl.multiply, operand0=scale)
    elif scale is None:
        nisa.tensor_tensor(dst=part, data1=source, data2=bias[:, start:end], op=nl.add)
    else:
        nisa.scalar_tensor_tensor(
            dst=part, data=source, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=bias[:, start:end]
        )


def normalise_heads(tile, weight, head, eps):
    """RMSNorm of each head of a float32 tile [rows, heads * D], in place; weight: [rows, D] or None."""
    rows, width = tile.shape
    count = width // head
    heads = tile.reshape((rows, count, head))
    squared = nl.ndarray(heads.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=squared, data1=heads, data2=heads, op=nl.multiply)
    squares = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=squares, op=nl.add, data=squared, axis=2)
    scale = inverse_root(squares, 1.0 / head, eps)
    each = scale.reshape((rows, count, 1)).broadcast(2, head)
    if weight is None:
        nisa.tensor_tensor(dst=heads, data1=heads, data2=each, op=nl.multiply)
        return
    nisa.tensor_tensor(dst=squared, data1=heads, data2=each, op=nl.multiply)
    repeated = weight.reshape((rows, 1, head)).broadcast(1, count)
    nisa.tensor_tensor(dst=heads, data1=squared, data2=repeated, op=nl.multiply)

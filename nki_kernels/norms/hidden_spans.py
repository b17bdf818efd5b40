"""Rows of a decode step with the hidden dim on the partitions, normalised and ready for a product.

A row on one partition leaves 127 partitions idle; spread over them it takes 128 times fewer cycles, and it has the
form of a stationary operand at once. Element h of a row lies on partition h // n, in block h % n, of the n blocks
that all full blocks of 128 make: so a partition reads n neighbouring elements. A *span* is (first, height, count):
`count` blocks of `height` elements from element `first` on. What does not fill a block is a second span, of one block.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.tiles import PARTITIONS, filled, load


def list_spans(hidden):
    """Return the spans of a row of `hidden` elements: all full blocks of 128, then the remaining elements.

    A span is (first, height, count): elements first … first + height * count - 1 of a row, on `height`
    partitions with `count` neighbouring elements each. Empty spans are left out.
    """
    spans = []
    full = hidden // PARTITIONS
    if full > 0:
        spans.append((0, PARTITIONS, full))
    if hidden > full * PARTITIONS:
        spans.append((full * PARTITIONS, hidden - full * PARTITIONS, 1))
    return spans


def load_span(rows, span):
    """Load a span of each row of `rows` [T, H] from HBM into a new SBUF tile [height, T, count] of the same dtype.

    span: (first, height, count), see `list_spans`. Element [p, t, i] is rows[t, first + p * count + i].
    """
    return load(view_span(rows, span), rows.dtype)


def view_span(rows, span):
    """View a span of each row of `rows` [T, H] in HBM as [height, T, count].

    Element [p, t, i] of the view is rows[t, first + p * count + i]. span: (first, height, count), see
    `list_spans`.
    """
    first, height, count = span
    return rows[:, first : first + height * count].reshape_dim(1, (height, count)).permute((1, 0, 2))


def repeat_over_blocks(column, count):
    """View `column` [height, T] as [height, T, count], each element repeated `count` times along the last dim."""
    return column.expand_dim(2).broadcast(2, count)


def sum_over_hidden(tiles):
    """Return the sum of each row over its whole hidden dim, on each of 128 partitions: [128, T] float32 in PSUM.

    tiles: the rows in SBUF, for each span of `list_spans` a tile [height, T, count].
    """
    rows = tiles[0].shape[1]
    ones = filled((PARTITIONS, PARTITIONS), 1.0)
    total = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.psum)
    for i in range(len(tiles)):
        height = tiles[i].shape[0]
        partial = nl.ndarray((height, rows), dtype=nl.float32, buffer=nl.sbuf)
        # Each partition sums its own elements first, so that the matmul moves T columns and not T * count.
        nisa.tensor_reduce(dst=partial, op=nl.add, data=tiles[i], axis=2)
        nisa.nc_matmul(dst=total, stationary=ones[0:height, :], moving=partial, accumulate=i > 0)
    return total


def subtract_mean(tiles, hidden):
    """Return new float32 tiles [height, T, count] in SBUF: each row of `tiles` minus its mean over all tiles.

    tiles: the rows in SBUF, for each span of `list_spans` a tile. hidden: elements of a row.
    """
    sums = sum_over_hidden(tiles)
    mean = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mean, data=sums, op0=nl.multiply, operand0=1.0 / hidden)
    results = []
    for i in range(len(tiles)):
        height, _, count = tiles[i].shape
        result = nl.ndarray(tiles[i].shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=result, data1=tiles[i], data2=repeat_over_blocks(mean[0:height, :], count), op=nl.subtract
        )
        results.append(result)
    return results


def load_normalised(results, x, norm):
    """Load rows x [T, H] from HBM, and write their RMSNorm, or LayerNorm if `norm` has a bias, to `results` in SBUF.

    results: for each span of `list_spans` a tile or view [height, T, count] of any dtype. norm: `Norm` with
    a weight; its offset is added to the weight.
    """
    rows, hidden = x.shape
    spans = list_spans(hidden)
    tiles, squares = [], []
    for i in range(len(spans)):
        tiles.append(load_span(x, spans[i]))
    if norm.bias is not None:
        tiles = subtract_mean(tiles, hidden)
    for i in range(len(spans)):
        squares.append(nl.ndarray(tiles[i].shape, dtype=nl.float32, buffer=nl.sbuf))
        nisa.activation(dst=squares[i], op=nl.square, data=tiles[i])
    sums = sum_over_hidden(squares)
    scale = compute_inverse_root(sums, 1.0 / hidden, filled((PARTITIONS, 1), norm.eps))
    for i in range(len(spans)):
        _, height, count = spans[i]
        weight = load_span(norm.weight, spans[i])
        if norm.offset != 0.0:
            raised = nl.ndarray(weight.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=raised, data=weight, op0=nl.add, operand0=norm.offset)
            weight = raised
        scaled = nl.ndarray((height, rows, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=scaled, data1=tiles[i], data2=repeat_over_blocks(scale[0:height, :], count), op=nl.multiply
        )
        if norm.bias is None:
            nisa.tensor_tensor(dst=results[i], data1=scaled, data2=weight.broadcast(1, rows), op=nl.multiply)
        else:
            weighted = nl.ndarray((height, rows, count), dtype=nl.float32, buffer=nl.sbuf)
            bias = load_span(norm.bias, spans[i])
            nisa.tensor_tensor(dst=weighted, data1=scaled, data2=weight.broadcast(1, rows), op=nl.multiply)
            nisa.tensor_tensor(dst=results[i], data1=weighted, data2=bias.broadcast(1, rows), op=nl.add)

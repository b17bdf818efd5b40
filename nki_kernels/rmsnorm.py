"""rmsnorm: each row divided by its root mean square, times a weight; plus a residual, if there is one, and scaled.

    y[t, h] = (x[t, h] / sqrt(mean over h of x[t, h]^2 + eps) * (weight[h] + norm_offset) + residual[t, h]) * scale

With a norm_bias it is a LayerNorm: the mean of each row is subtracted first, and norm_bias[h] added after the weight.

Dimensions:
    T   rows (tokens); H elements of a row on this rank (the hidden size, or the width of all its heads).

Arguments:
    x              [T, H] @ HBM, float32 or bfloat16
    weight         [1, H] @ HBM, float32 or bfloat16
    eps            compile-time float
    residual       [T, H] @ HBM, x's dtype, or None
    norm_offset    compile-time float: 1.0 for Gemma
    replica_group  nki.collectives.ReplicaGroup whose ranks hold parts of each row, or None
    row_elements   compile-time int: elements of a row whose squares all ranks of the group sum up; H without a group.
                   An element that several ranks hold counts once for each; zeros that pad a rank's part do not count.
    scale          [1, 1] @ HBM, float32 or bfloat16: multiplies the sum with the residual, or None
    norm_bias      [1, H] @ HBM, float32 or bfloat16, or None; without a residual and a replica_group
    returns y      [T, H] @ HBM, x's dtype

Layout
    Rows on the partitions, so that the sum over h runs along the free dim, on the Scalar engine while it squares. The
    Tensor engine puts the weight on every partition. Up to 16 rows without a group have H on the partitions instead, so
    that a few rows use all lanes (`normalise_few_rows`, `norms/hidden_spans.py`).

Tiling
    for 128 rows: load, square and sum, rsqrt, scale and weigh in one pass, add, store. The next rows are loaded before.
    Over ranks the sums of all rows are taken first, in one all-reduce of [128, T / 128] float32.

Limits:
    H up to 8192. SBUF holds two row tiles, two of the residual, the weight, and one float32 row tile where bfloat16
    rows have a residual.

Cost
    HBM: x once, over ranks twice; y, residual and weight once. Bound: DMA; for few rows the length of a row.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.norms.hidden_spans import list_spans, load_normalised, load_span, view_span
from nki_kernels.norms.norm import Norm, compute_inverse_root
from nki_kernels.norms.row_tiles import (
    RowStatistics,
    allocate_row_scratch,
    compute_row_statistics,
    load_norm,
    normalise,
    sum_rows,
)
from nki_kernels.precision import widened, widened_or_zero
from nki_kernels.tiles import PARTITIONS, broadcast_row, expect_dims, load, ranges

cores = (1,)

MAX_HIDDEN = 8192

FEW_ROWS = 16
"""Most rows that are taken with H on the partitions."""


@nki.jit
def rmsnorm(
    x,
    weight,
    eps,
    residual=None,
    norm_offset=0.0,
    replica_group=None,
    row_elements=None,
    scale=None,
    norm_bias=None,
):
    """Return y [T, H] @ HBM in x's dtype: (x / rms(x) * (weight + norm_offset) + residual) * scale, row by row.

    rms is sqrt(mean of squares + eps). A residual or scale that is None is left out. With a replica_group,
    each rank has H of the row_elements elements of a row, and rms is over all of them. With a norm_bias, the
    mean of each row is subtracted from x first, and the bias is added last.

    Raises AssertionError if shapes or dtypes do not fit together, H is above 8192, or scale comes without a
    residual. Also if row_elements is missing with a replica_group, or differs from H without one, or if
    norm_bias comes with a residual or a replica_group.
    """
    expect_dims(2, x, "x [T, H]")
    tokens, hidden = x.shape
    assert weight.shape == (1, hidden), f"weight is [1, {hidden}] for rows of {hidden}, not {weight.shape}"
    assert hidden <= MAX_HIDDEN, f"rmsnorm takes rows of at most {MAX_HIDDEN}, not {hidden}"
    if residual is not None:
        assert residual.shape == x.shape, f"residual is {x.shape}, as x is, not {residual.shape}"
        assert residual.dtype == x.dtype, f"residual is {residual.dtype}, x is {x.dtype}"
    counted = hidden if row_elements is None and replica_group is None else row_elements
    assert counted is not None and counted >= 1, f"row_elements of a group is 1 or more, not {row_elements}"
    assert replica_group is not None or counted == hidden, (
        f"row_elements is {row_elements} for rows of {hidden} without a replica_group; leave it out"
    )
    if scale is not None:
        assert residual is not None, "scale is given without a residual; pass one, or scale the weight"
        assert scale.shape == (1, 1), f"scale is [1, 1], not {scale.shape}"
    assert norm_bias is None or (residual is None and replica_group is None), (
        "norm_bias is given with a residual or a replica_group; a LayerNorm takes whole rows alone"
    )
    norm = Norm(weight, norm_bias, norm_offset, eps)
    norm.check(hidden)
    y = nl.ndarray((tokens, hidden), dtype=x.dtype, buffer=nl.shared_hbm)
    if tokens <= FEW_ROWS and replica_group is None:
        normalise_few_rows(y, x, norm, residual, scale)
        return y
    rows = min(tokens, PARTITIONS)
    factor = None if scale is None else broadcast_row(scale, rows, nl.float32, 0.0)
    scratch = allocate_row_scratch(rows, hidden, x.dtype)
    row_norm = load_norm(norm, scratch, weight.dtype)
    starts = ranges(0, tokens)
    sums = None
    if replica_group is not None:
        sums = sum_squares_over_ranks(x, starts, scratch, replica_group)
    ahead = load_operands(x, residual, starts[0])
    for number in range(len(starts)):
        first, last = starts[number]
        tile, residual_tile = ahead
        if number + 1 < len(starts):
            ahead = load_operands(x, residual, starts[number + 1])
        if sums is None:
            statistics = compute_row_statistics(tile, row_norm)
        else:
            squares = sums[0 : last - first, number : number + 1]
            statistics = RowStatistics(None, compute_inverse_root(squares, 1.0 / counted, row_norm.eps))
        nisa.dma_copy(
            dst=y[first:last, :], src=normalise_and_add(tile, residual_tile, statistics, row_norm, factor)
        )
    return y


def normalise_few_rows(y, x, norm, residual, scale):
    """Write y [T, H] @ HBM for at most FEW_ROWS rows, with H on the partitions, so that few rows use all of them.

    norm: Norm. residual: [T, H] @ HBM, or None. scale: [1, 1] @ HBM, or None; it comes with a residual.
    """
    tokens, hidden = x.shape
    spans = list_spans(hidden)
    factor = None if scale is None else broadcast_row(scale, spans[0][1], nl.float32, 0.0)
    results = []
    for i in range(len(spans)):
        _, height, count = spans[i]
        dtype = x.dtype if residual is None else nl.float32
        results.append(nl.ndarray((height, tokens, count), dtype=dtype, buffer=nl.sbuf))
    load_normalised(results, x, norm)
    for i in range(len(spans)):
        result = results[i]
        if residual is not None:
            result = load_span(residual, spans[i])
            add_scaled(result, results[i], factor)
        nisa.dma_copy(dst=view_span(y, spans[i]), src=result)


def load_operands(x, residual, rows):
    """Load rows (first, last) of x and of the residual into two new SBUF tiles; return both, None for no residual."""
    first, last = rows
    residual_tile = None if residual is None else load(residual[first:last, :], residual.dtype)
    return load(x[first:last, :], x.dtype), residual_tile


def add_scaled(dst, wide, factor):
    """Write (dst + wide) * factor to `dst`, which holds the residual, rounded once.

    Args:
        dst: SBUF tile [partition, …] in x's dtype, overwritten.
        wide: float32 SBUF tile of the same shape. It is overwritten too if there is a factor.
        factor: float32 column in SBUF that multiplies each partition, or None.
    """
    if factor is None:
        nisa.tensor_tensor(dst=dst, data1=wide, data2=dst, op=nl.add)
        return
    nisa.tensor_tensor(dst=wide, data1=wide, data2=dst, op=nl.add)
    nisa.tensor_scalar(dst=dst, data=wide, op0=nl.multiply, operand0=factor[0 : wide.shape[0], :])


def normalise_and_add(tile, residual_tile, statistics, norm, factor):
    """Return an SBUF tile with (normalised rows + residual) * factor, rounded once.

    Without a residual `tile` is overwritten with its normalised rows and returned. With one, `residual_tile`
    is overwritten and returned, and a float32 `tile` is overwritten too.

    Args:
        tile: SBUF row tile [row, H].
        residual_tile: SBUF tile of the same shape and dtype, or None.
        statistics: RowStatistics of the rows of `tile`.
        norm: RowNorm.
        factor: float32 column that multiplies the sum with the residual, or None.
    """
    if residual_tile is None:
        normalise(tile, tile, statistics, norm)
        return tile
    wide = tile
    if tile.dtype != nl.float32:
        wide = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    normalise(wide, tile, statistics, norm)
    add_scaled(residual_tile, wide, factor)
    return residual_tile


def sum_squares_over_ranks(x, starts, scratch, replica_group):
    """Return the sum of the squares of each row over all ranks: float32 [row in tile, tile] in SBUF.

    x is loaded once for it, and one all-reduce takes all rows.

    Args:
        x: [T, H] @ HBM, this rank's part of the rows.
        starts: ranges (first, last) of the rows of each tile.
        scratch: SBUF tile that is overwritten with squares.
        replica_group: the ranks.
    """
    sums = nl.ndarray((scratch.shape[0], len(starts)), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sums, value=0.0)
    for number in range(len(starts)):
        first, last = starts[number]
        tile = load(x[first:last, :], x.dtype)
        sum_rows(sums[0 : last - first, number : number + 1], nl.square, tile, None, scratch)
    ncc.all_reduce(srcs=[sums], dsts=[total], replica_group=replica_group, op=nl.add)
    return total


def rmsnorm_reference(
    x: np.ndarray,
    weight: np.ndarray,
    eps: float,
    residual: np.ndarray | None = None,
    norm_offset: float = 0.0,
    replica_group: object = None,
    row_elements: int | None = None,
    scale: np.ndarray | None = None,
    norm_bias: np.ndarray | None = None,
) -> np.ndarray:
    """Return (x / rms(x) * (weight + norm_offset) + residual) * scale in x's dtype, computed in float32, rounded once.

    A residual or scale that is None is left out. With a norm_bias it is a LayerNorm. replica_group and
    row_elements are ignored: for several ranks pass the whole rows.
    """
    wide = widened(x)
    if norm_bias is not None:
        wide = wide - np.mean(wide, axis=1, keepdims=True)
    root = 1 / np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + wide.dtype.type(eps))
    normalised = wide * root * (widened(weight) + wide.dtype.type(norm_offset))
    result = normalised + widened_or_zero(norm_bias) + widened_or_zero(residual)
    return (result if scale is None else result * widened(scale)).astype(x.dtype)

"""output_projection: the heads' outputs back to the hidden size, summed over ranks, plus the residual.

    y = residual + sum over ranks of o @ w_o

Dimensions
    T   tokens; K width of this rank's heads (heads times head size); H hidden size.

Arguments
    o              [T, K] @ HBM, float32 or bfloat16: this rank's heads
    w_o            [K, H] @ HBM, float32 or bfloat16: this rank's rows; read in o's dtype
    residual       [T, H] @ HBM, o's dtype, the same on every rank
    replica_group  nki.collectives.ReplicaGroup, or None for one rank
    returns y      [T, H] @ HBM, o's dtype, the same on every rank

Layout
    As matmul: K on the partitions for the product, rows on the partitions for its result.

Tiling
    As matmul. With one rank the residual is added to each result as it leaves PSUM. With several the partial products
    go, in float32, to a named internal buffer, which the ranks sum; then the residual is added for 128 rows at a time.

Limits
    K up to 16384, H up to 8192.

Cost
    HBM: w_o ceil(T / R) times with matmul's R, o, residual and y once; over ranks also the partial product, float32,
    four times. Bound: reading w_o; for few rows over several ranks the latency of the all-reduce.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.all_reduce import sum_over_ranks
from nki_kernels.matmul import MAX_CONTRACTION
from nki_kernels.precision import widened
from nki_kernels.rmsnorm import MAX_HIDDEN
from nki_kernels.tiles import (
    PARTITIONS,
    columns_at_once,
    expect_dims,
    load,
    load_transposed,
    multiply,
    rows_at_once,
)


@nki.jit
def output_projection(o, w_o, residual, replica_group=None):
    """The residual plus the sum over ranks of o @ w_o."""
    expect_dims(2, o, "o [T, K]")
    expect_dims(2, w_o, "w_o [K, H]")
    tokens, depth = o.shape
    hidden = w_o.shape[1]
    assert w_o.shape[0] == depth, f"w_o has {w_o.shape[0]} rows for o of width {depth}"
    assert residual.shape == (tokens, hidden), f"residual is [{tokens}, {hidden}], not {residual.shape}"
    assert residual.dtype == o.dtype, f"residual is {residual.dtype}, o is {o.dtype}"
    assert depth <= MAX_CONTRACTION, f"output_projection contracts at most {MAX_CONTRACTION}, not {depth}"
    assert hidden <= MAX_HIDDEN, (
        f"output_projection takes a hidden size of at most {MAX_HIDDEN}, not {hidden}"
    )
    y = nl.ndarray((tokens, hidden), dtype=o.dtype, buffer=nl.shared_hbm)
    partial = partial_sums(y, replica_group, "output_projection_partial")
    step = rows_at_once(depth)
    for first in range(0, tokens, step):
        o_blocks = load_transposed(o, first, min(step, tokens - first))
        project(o_blocks, w_o, first, residual, y, partial)
    if replica_group is not None:
        add_residual(sum_over_ranks(partial, replica_group, "output_projection_total"), residual, y)
    return y


def partial_sums(y, replica_group, name):
    """An internal float32 buffer of y's shape for sums over ranks; None for one rank."""
    if replica_group is None:
        return None
    return nl.ndarray(y.shape, dtype=nl.float32, buffer=nl.private_hbm, name=name)


def project(x, weight, first, residual, y, partial):
    """x [k in block, block, row] @ weight [K, H]: into rows of `partial`, or of y plus the residual if that is None."""
    rows = x.shape[2]
    hidden = weight.shape[1]
    width = columns_at_once(rows)
    for column in range(0, hidden, width):
        last = min(hidden, column + width)
        sums = multiply(x, weight[:, column:last])
        for tile in range(len(sums)):
            row = first + tile * PARTITIONS
            end = row + sums[tile].shape[0]
            if partial is None:
                before = load(residual[row:end, column:last], residual.dtype)
                result = nl.ndarray(before.shape, dtype=y.dtype, buffer=nl.sbuf)
                nisa.tensor_tensor(dst=result, data1=sums[tile], data2=before, op=nl.add)
                nisa.dma_copy(dst=y[row:end, column:last], src=result)
            else:
                result = nl.ndarray(sums[tile].shape, dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_copy(dst=result, src=sums[tile])
                nisa.dma_copy(dst=partial[row:end, column:last], src=result)


def add_residual(total, residual, y):
    """y = total + residual, for 128 rows at a time."""
    tokens = y.shape[0]
    for first in range(0, tokens, PARTITIONS):
        last = min(tokens, first + PARTITIONS)
        before = load(residual[first:last, :], residual.dtype)
        summed = load(total[first:last, :], nl.float32)
        result = nl.ndarray(before.shape, dtype=y.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=summed, data2=before, op=nl.add)
        nisa.dma_copy(dst=y[first:last, :], src=result)


def output_projection_reference(
    o: np.ndarray, w_o: np.ndarray, residual: np.ndarray, replica_group: object = None
) -> np.ndarray:
    """Product and sum in float32. For several ranks pass the whole o and w_o: the sum over ranks is their product."""
    return (widened(residual) + widened(o) @ widened(w_o)).astype(o.dtype)

"""mlp: the gated feed-forward block of a Llama layer, with its RMSNorm, its residual and the sum over ranks.

    n = rmsnorm(x, norm_weight, eps);   y = x + sum over ranks of (silu(n @ w_gate) * (n @ w_up)) @ w_down

Dimensions
    T   tokens; H hidden size; F this rank's part of the intermediate size.

Arguments
    x              [T, H] @ HBM, float32 or bfloat16, the same on every rank
    norm_weight    [1, H] @ HBM, float32 or bfloat16
    w_gate, w_up   [H, F] @ HBM, float32 or bfloat16: this rank's columns; read in x's dtype
    w_down         [F, H] @ HBM, float32 or bfloat16: this rank's rows; read in x's dtype
    eps            compile-time float
    replica_group  nki.collectives.ReplicaGroup, or None for one rank
    returns y      [T, H] @ HBM, x's dtype, the same on every rank

Layout
    On the partitions lie rows for the norm, H for the first two products, rows for silu and the gate, and F for the
    last product. The intermediate never goes to HBM.

Tiling
    for up to 512 rows, fewer if [H/128, rows] or [F/128, rows] outgrows 16384 elements
        normalise and transpose the rows
        for 512 to 2048 columns of F: gate product, silu; up product, gated as it leaves PSUM; transpose into blocks
        the product with w_down as in output_projection

Limits
    H up to 8192, F up to 16384.

Cost
    HBM: the three weights once for each row group, x twice, y once, min(T, 128) times the norm's weight; over ranks
    also the partial product, float32, four times. Bound: reading the weights, up to some hundred rows; for few rows
    over several ranks also the latency of the all-reduce.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.all_reduce import sum_over_ranks
from nki_kernels.matmul import MAX_CONTRACTION
from nki_kernels.output_projection import add_residual, partial_sums, project
from nki_kernels.precision import widened
from nki_kernels.rmsnorm import MAX_HIDDEN, rmsnorm_reference
from nki_kernels.tiles import (
    PARTITIONS,
    blocks,
    columns_at_once,
    expect_dims,
    load_repeated,
    load_transposed,
    multiply,
    rows_at_once,
    transpose_into,
)


@nki.jit
def mlp(x, norm_weight, w_gate, w_up, w_down, eps, replica_group=None):
    """The gated feed-forward block with its norm, its residual and the sum over ranks."""
    expect_dims(2, x, "x [T, H]")
    expect_dims(2, w_gate, "w_gate [H, F]")
    tokens, hidden = x.shape
    inner = w_gate.shape[1]
    assert hidden <= MAX_HIDDEN, f"mlp takes a hidden size of at most {MAX_HIDDEN}, not {hidden}"
    assert inner <= MAX_CONTRACTION, (
        f"mlp takes an intermediate size of at most {MAX_CONTRACTION}, not {inner}"
    )
    assert norm_weight.shape == (1, hidden), f"norm_weight is [1, {hidden}], not {norm_weight.shape}"
    assert w_gate.shape[0] == hidden, f"w_gate has {w_gate.shape[0]} rows for a hidden size of {hidden}"
    assert w_up.shape == w_gate.shape, f"w_gate is {w_gate.shape}, w_up is {w_up.shape}"
    assert w_down.shape == (inner, hidden), f"w_down is [{inner}, {hidden}], not {w_down.shape}"
    y = nl.ndarray((tokens, hidden), dtype=x.dtype, buffer=nl.shared_hbm)
    partial = partial_sums(y, replica_group, "mlp_partial")
    weights = load_repeated(norm_weight, min(tokens, PARTITIONS))
    step = min(rows_at_once(hidden), rows_at_once(inner))
    for first in range(0, tokens, step):
        x_blocks = load_transposed(x, first, min(step, tokens - first), weights, eps)
        project(gated(x_blocks, w_gate, w_up), w_down, first, x, y, partial)
    if replica_group is not None:
        add_residual(sum_over_ranks(partial, replica_group, "mlp_total"), x, y)
    return y


def gated(x, w_gate, w_up):
    """silu(n @ w_gate) * (n @ w_up), for n as blocks [h in block, block, row]: blocks [f in block, block, row]."""
    rows = x.shape[2]
    inner = w_gate.shape[1]
    result = nl.ndarray((min(PARTITIONS, inner), blocks(inner), rows), dtype=x.dtype, buffer=nl.sbuf)
    width = columns_at_once(rows)
    for column in range(0, inner, width):
        last = min(inner, column + width)
        gate_sums = multiply(x, w_gate[:, column:last])
        gates = []
        for tile in range(len(gate_sums)):
            gate = nl.ndarray(gate_sums[tile].shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=gate, op=nl.silu, data=gate_sums[tile])
            gates.append(gate)
        up_sums = multiply(x, w_up[:, column:last])
        for tile in range(len(up_sums)):
            product = nl.ndarray(up_sums[tile].shape, dtype=x.dtype, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=product, data1=up_sums[tile], data2=gates[tile], op=nl.multiply)
            transpose_into(result, column // PARTITIONS, tile * PARTITIONS, product)
    return result


def mlp_reference(
    x: np.ndarray,
    norm_weight: np.ndarray,
    w_gate: np.ndarray,
    w_up: np.ndarray,
    w_down: np.ndarray,
    eps: float,
    replica_group: object = None,
) -> np.ndarray:
    """The formula in float32. For several ranks pass the whole weights: the sum over ranks is their product."""
    wide = widened(x)
    normalised = rmsnorm_reference(wide, norm_weight, eps)
    gate = normalised @ widened(w_gate)
    inner = gate / (1 + np.exp(-gate)) * (normalised @ widened(w_up))
    return (wide + inner @ widened(w_down)).astype(x.dtype)

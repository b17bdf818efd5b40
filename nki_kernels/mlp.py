"""mlp: the feed-forward block of a layer, with its norm, its residual and the sum over ranks.

    n = norm(x);   y = x + sum over ranks of (activation(n @ w_gate + b_gate) * (n @ w_up + b_up)) @ w_down + b_down

Without w_gate the block is plain: activation(n @ w_up + b_up) @ w_down. The norm is RMSNorm, LayerNorm if norm_bias is
given, none without norm_weight; norm_offset is added to its weight (1.0 for Gemma). Without `residual`, x is not added.
With a row_gate the sum over ranks is multiplied by sigmoid(n @ row_gate), one number for each row.

Dimensions
    T   tokens; H hidden size; F this rank's part of the intermediate size.

Arguments
    x                [T, H] @ HBM, float32 or bfloat16, the same on every rank; cut over ranks this rank's T/N rows
    norm_weight      [1, H] @ HBM, float32 or bfloat16, or None; norm_bias the same
    w_gate, w_up     [H, F] @ HBM, float32 or bfloat16: this rank's columns; read in x's dtype; w_gate may be None
    w_down           [F, H] @ HBM, float32 or bfloat16: this rank's rows; read in x's dtype
    eps, norm_offset compile-time floats
    replica_group    nki.collectives.ReplicaGroup, or None for one rank
    activation       "silu", "gelu" (by the error function), "gelu_tanh" or "relu"
    b_gate, b_up     [1, F] @ HBM, float32 or bfloat16: this rank's columns, or None
    b_down           [1, H] @ HBM, float32 or bfloat16, the same on every rank, or None
    residual         compile-time bool: whether x is added
    sequence_ranks   compile-time int, N: the ranks of the group over which x and y are cut along the sequence; 1: none
    row_gate         [H, 1] @ HBM, float32 or bfloat16, the same on every rank; read in x's dtype; or None
    returns y        [T, H] @ HBM, x's dtype, the same on every rank; of rows that are cut [T/N, H], as x

Layout
    Rows lie on the partitions for the norm, H for the first two products. Their weights are stationary and the rows
    move. So F lies on the partitions of the results, as the last product takes it. The intermediate never goes to HBM.

Tiling
    for each group of up to 512 rows, fewer if its rows, their transposes and the intermediate outgrow SBUF
        chunks of columns of the product of the group before with w_down, see `residual_product`
        between them units of F (256 columns for 512 rows): gate and up product, activation and gate from PSUM
        rows of the next group are loaded and normalised meanwhile, and transposed after the last unit
    Cut along the sequence, each rank normalises its rows and gathers those of all, group by group, and a reduce-scatter
        takes the place of the all-reduce, see `sequence`.
    Two cores of a logical core take half of the rows each. Up to 128 rows they take half of F, exchange their parts of
        the intermediate, and take half of the columns of y.
    A last block of 64 columns of F shares the array: gate beside up, and in the last product two row tiles.

Limits
    H up to 8192, in bfloat16 without biases and offset of the norm up to 16384; F up to 16384. A row_gate comes
    without b_down.

Cost
    HBM: the three weights once for each group, the norm's weight and the biases once, x twice (once up to 128 rows), y
    once. Over ranks: one all-reduce of y's size in x's dtype, from SBUF to SBUF in chunks; of rows that are cut one
    all-gather, of which rows are written to HBM and read, and one reduce-scatter. Rounding to x's dtype: the
    normalised rows, the intermediate, over ranks the partial product and the sum, and y.
    Predicted on trn2 in bfloat16, of the floor: 95 % for T = 8192 (H = 4096, F = 1792), 85 % (H = 8192, F = 448);
    95 % for T = 1 and 91 % in decode. On two cores 86 to 92 % of half of the floor (H = 8192, F = 896). Bound: the
    Tensor engine from some hundred rows on, below it reading the weights. A sum over 2 ranks adds 4 % to T = 2048
    (H = 8192, F = 896), over 8 ranks 23 %; with rows that are cut 4 and 6 %.
"""

from __future__ import annotations

import nki
import nki.language as nl
import numpy as np

from nki_kernels.cores import divides_columns, own_columns, own_rows, part
from nki_kernels.dma import STATIC
from nki_kernels.matmul import MAX_CONTRACTION
from nki_kernels.precision import erf_reference, widened, widened_or_zero
from nki_kernels.projection.block_loads import load_cast
from nki_kernels.projection.feed_forward import INNER_UNIT, pipeline, tiles_at_once
from nki_kernels.projection.gated_product import bias_columns, in_both_halves
from nki_kernels.projection.normalised_rows import SCRATCH_ELEMENTS, load_norm, on_every_row
from nki_kernels.projection.residual_product import residual_product
from nki_kernels.projection.row_groups import (
    bytes_of,
    own_height,
    row_groups,
)
from nki_kernels.projection.sequence import check_ranks, gathered_rows, whole_rows
from nki_kernels.projection.sums import store_last_sums
from nki_kernels.tiles import BANK, MAX_ROW_BYTES, PARTITIONS, expect_dims, expect_hidden

SUMS_AHEAD = 2
"""Chunks whose sums over the ranks may be under way before the first of them is stored: beside groups of rows."""

FEW_SUMS_AHEAD = 8
"""The same for up to 128 rows: a collective takes longer than a chunk."""


@nki.jit
def mlp(
    x,
    norm_weight,
    w_gate,
    w_up,
    w_down,
    eps,
    replica_group=None,
    activation="silu",
    b_gate=None,
    b_up=None,
    b_down=None,
    norm_bias=None,
    norm_offset=0.0,
    residual=True,
    sequence_ranks=1,
    row_gate=None,
):
    """The feed-forward block with its norm, its residual and the sum over ranks."""
    check_arguments(x, norm_weight, w_gate, w_up, w_down, b_gate, b_up, b_down, norm_bias, norm_offset)
    ranks = sequence_ranks
    if row_gate is not None:
        assert row_gate.shape == (x.shape[1], 1), f"row_gate is [{x.shape[1]}, 1], not {row_gate.shape}"
        assert b_down is None, "row_gate comes without b_down"
    owned, hidden = x.shape
    tokens = ranks * owned
    check_ranks(ranks, replica_group, tokens)
    y = nl.ndarray((owned, hidden), dtype=x.dtype, buffer=nl.shared_hbm)
    first, last = own_rows(owned, ranks)
    x = x[first:last, :]
    left, right = own_columns(tokens, w_up.shape[1], INNER_UNIT)
    rows = min(last - first, PARTITIONS)
    weights = [w_up[:, left:right]]
    if w_gate is not None:
        weights = [w_gate[:, left:right], w_up[:, left:right]]
    exchanges = divides_columns(tokens)
    stage = {
        "x": x,
        "ranks": ranks,
        "norm": None,
        "scratch": nl.ndarray((rows, min(hidden, SCRATCH_ELEMENTS)), dtype=x.dtype, buffer=nl.sbuf),
        "weights": weights,
        "biases": [
            bias_columns(columns_of(b_gate, left, right)),
            bias_columns(columns_of(b_up, left, right)),
        ],
        "function": activation_function(activation),
        "inner": w_up.shape[1],
        "columns": own_columns(tokens, hidden, BANK),
        "exchanges": exchanges,
        "runs": False,
    }
    held = 0
    if norm_weight is not None:
        stage["norm"] = load_norm(norm_weight, norm_bias, norm_offset, eps, rows, x.dtype)
        held = bytes_of(stage["norm"][0]) + bytes_of(stage["norm"][1])
    start, end = stage["columns"]
    down = [w_down[left:right, start:end]]
    if exchanges:
        first_other, last_other = part(w_up.shape[1], INNER_UNIT, 1 - nl.program_id(0))
        down.append(w_down[first_other:last_other, start:end])
    after = None if b_down is None else on_every_row(b_down[:, start:end], rows, x.dtype, 0.0)
    paired = in_both_halves(weights) and ranks * x.shape[0] > PARTITIONS
    tiles = tiles_at_once(hidden, w_up.shape[1], x.dtype, held + bytes_of(after), ranks)
    most = max(1, tiles) * own_height(ranks)
    stage["rows"] = whole_rows(x)
    if ranks > 1:
        stage["rows"] = gathered_rows(x, stage["norm"], stage["scratch"], ranks, replica_group, most)
    job = residual_product(
        y[first:last, start:end],
        x[:, start:end] if residual else None,
        down,
        after,
        replica_group,
        ranks,
        paired=paired,
        ahead=SUMS_AHEAD if tokens > PARTITIONS else FEW_SUMS_AHEAD,
    )
    if row_gate is not None:
        stage["row_gate"] = load_cast(row_gate, x.dtype, STATIC)
        job["factors"] = []
    groups = row_groups(last - first, most)
    if tiles > 0:
        pipeline(stage, job, groups)
    else:
        for number in range(len(groups)):
            pipeline(stage, job, groups[number : number + 1])
    store_last_sums(job)
    return y


def check_arguments(x, norm_weight, w_gate, w_up, w_down, b_gate, b_up, b_down, norm_bias, norm_offset):
    """Refuse shapes that do not fit together, and sizes beyond the limits."""
    expect_dims(2, x, "x [T, H]")
    expect_dims(2, w_up, "w_up [H, F]")
    hidden = x.shape[1]
    inner = w_up.shape[1]
    wide_rows = norm_bias is not None or b_down is not None or norm_offset != 0.0
    expect_hidden(
        "mlp", x, hidden, MAX_ROW_BYTES // 2 if wide_rows and x.dtype != nl.float32 else MAX_ROW_BYTES
    )
    assert inner <= MAX_CONTRACTION, (
        f"mlp takes an intermediate size of at most {MAX_CONTRACTION}, not {inner}"
    )
    assert norm_bias is None or norm_weight is not None, "norm_bias is given without norm_weight"
    if w_gate is not None:
        assert w_gate.shape[0] == hidden, f"w_gate has {w_gate.shape[0]} rows for a hidden size of {hidden}"
        assert w_gate.shape == w_up.shape, f"w_gate is {w_gate.shape}, w_up is {w_up.shape}"
    assert w_up.shape[0] == hidden, f"w_up has {w_up.shape[0]} rows for a hidden size of {hidden}"
    assert w_down.shape == (inner, hidden), f"w_down is [{inner}, {hidden}], not {w_down.shape}"
    assert w_gate is not None or b_gate is None, "b_gate is given without w_gate"
    expect_row(norm_weight, hidden, "norm_weight")
    expect_row(b_gate, inner, "b_gate")
    expect_row(b_up, inner, "b_up")
    expect_row(b_down, hidden, "b_down")
    expect_row(norm_bias, hidden, "norm_bias")


def columns_of(row, left, right):
    """Columns left … right of a row, if it is given."""
    return None if row is None else row[:, left:right]


def expect_row(row, columns, name):
    """Refuse a row that is given and has not the shape [1, columns]."""
    if row is not None:
        assert row.shape == (1, columns), f"{name} is [1, {columns}], not {row.shape}"


def activation_function(name):
    """The function of the Scalar engine by its name."""
    assert name in ("silu", "gelu", "gelu_tanh", "relu"), (
        f"activation is silu, gelu, gelu_tanh or relu, not {name}"
    )
    if name == "silu":
        return nl.silu
    if name == "relu":
        return nl.relu
    return nl.gelu if name == "gelu" else nl.gelu_apprx_tanh


def mlp_reference(
    x: np.ndarray,
    norm_weight: np.ndarray | None,
    w_gate: np.ndarray | None,
    w_up: np.ndarray,
    w_down: np.ndarray,
    eps: float,
    replica_group: object = None,
    activation: str = "silu",
    b_gate: np.ndarray | None = None,
    b_up: np.ndarray | None = None,
    b_down: np.ndarray | None = None,
    norm_bias: np.ndarray | None = None,
    norm_offset: float = 0.0,
    residual: bool = True,
    sequence_ranks: int = 1,
    row_gate: np.ndarray | None = None,
) -> np.ndarray:
    """The formula in float32. For several ranks pass the whole of all: the sum over ranks is the product."""
    normalised = widened(x)
    if norm_bias is not None:
        normalised = normalised - normalised.mean(axis=-1, keepdims=True)
    if norm_weight is not None:
        normalised = normalised / np.sqrt((normalised * normalised).mean(axis=-1, keepdims=True) + eps)
        normalised = normalised * (widened(norm_weight) + norm_offset) + widened_or_zero(norm_bias)
    inner = normalised @ widened(w_up) + widened_or_zero(b_up)
    if w_gate is None:
        inner = activation_reference(inner, activation)
    else:
        gate = normalised @ widened(w_gate) + widened_or_zero(b_gate)
        inner = activation_reference(gate, activation) * inner
    y = inner @ widened(w_down) + widened_or_zero(b_down)
    if row_gate is not None:
        y = y / (1 + np.exp(-(normalised @ widened(row_gate))))
    return (widened_or_zero(x if residual else None) + y).astype(x.dtype)


def activation_reference(values: np.ndarray, name: str) -> np.ndarray:
    """silu, gelu by the error function, gelu by tanh, or relu."""
    if name == "silu":
        return values / (1 + np.exp(-values))
    if name == "gelu":
        return values / 2 * (1 + erf_reference(values / np.sqrt(2.0).astype(values.dtype)))
    if name == "gelu_tanh":
        cubic = values + 0.044715 * values * values * values
        return values / 2 * (1 + np.tanh(np.sqrt(2 / np.pi).astype(values.dtype) * cubic))
    return np.maximum(values, 0)

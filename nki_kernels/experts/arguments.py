"""Arguments that `experts_decode` and `experts_prefill` share: records, checks, limits, and the reference.

T is the number of tokens, K the experts that each chooses, E the number of experts, H the hidden size, and F the
intermediate size on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl
import numpy as np

from nki_kernels.experts.activation import CLAMPED, SIGMOID_SCALE
from nki_kernels.mlp import activation_reference
from nki_kernels.precision import widen_blocks_reference, widened
from nki_kernels.tiles import BANK, expect_dims
from nki_kernels.weights import WeightMatrix, check_stack_scales

MAX_ROW_BYTES = 16384
"""Bytes per partition of a row of activations."""


@dataclass
class Routing(nl.NKIObject):
    """Experts of each token @ HBM: weights [T, K] float32 and ids [T, K] int32.

    absent: whether ids may be E, the number of experts: then the expert is on another rank, and its weight is 0.
    """

    weights: nl.NkiTensor
    ids: nl.NkiTensor
    absent: bool


@dataclass
class ExpertWeights(nl.NKIObject):
    """Weights of all experts @ HBM.

    w_gate and w_up are stacks [E, H, F], w_down is [E, F, H]. Their scales are [E, 1, F] and [E, 1, H], or None; their
    block scales [E, ceil(H / 128), ceil(F / 128)], with both exchanged for w_down, or None. b_gate and b_up are biases
    [E, F] or None, b_down is [E, H] or None.
    """

    w_gate: WeightMatrix
    w_up: WeightMatrix
    w_down: WeightMatrix
    b_gate: nl.NkiTensor | None
    b_up: nl.NkiTensor | None
    b_down: nl.NkiTensor | None


def create_expert_weights(w_gate, w_up, w_down, scales, block_scales, b_gate, b_up, b_down):
    """Return a kernel's weights and biases as an `ExpertWeights`, each weight wrapped in a `WeightMatrix`.

    scales, block_scales: those of w_gate, w_up and w_down, tuples; None for a weight without them.
    """
    # Loads of stacks apply block scales where they get them, and leave the elements otherwise.
    matrices = (
        WeightMatrix(w_gate, scales[0], None, block_scales[0], True),
        WeightMatrix(w_up, scales[1], None, block_scales[1], True),
        WeightMatrix(w_down, scales[2], None, block_scales[2], True),
    )
    return ExpertWeights(matrices[0], matrices[1], matrices[2], b_gate, b_up, b_down)


def check_arguments(residual, n, routing, experts):
    """Raise AssertionError if shapes or dtypes do not fit together, H is above MAX_ROW_BYTES, or E is above BANK.

    Args:
        residual: [T, H] @ HBM or None.
        n: rows [T, H] @ HBM.
        routing: `Routing` of the T tokens.
        experts: `ExpertWeights`.
    """
    ids, w_gate, w_down = routing.ids, experts.w_gate.elements, experts.w_down.elements
    expect_dims(2, n, "n [T, H]")
    expect_dims(2, ids, "ids [T, K]")
    expect_dims(3, w_gate, "w_gate [E, H, F]")
    tokens, hidden = n.shape
    count, _, inner = w_gate.shape
    most = MAX_ROW_BYTES // (4 if n.dtype == nl.float32 else 2)
    assert hidden <= most, f"experts take a hidden size of at most {most}, not {hidden}"
    assert count <= BANK, f"experts kernels take at most {BANK} experts, not {count}; divide them among ranks"
    if residual is not None:
        assert n.shape == residual.shape and n.dtype == residual.dtype, (
            f"n is {n.shape} {n.dtype}, residual is {residual.shape} {residual.dtype}; both must be equal"
        )
    assert ids.shape[0] == tokens, (
        f"ids has {ids.shape[0]} rows, n has {tokens}; pass one row of each for a token"
    )
    assert routing.absent or ids.shape[1] <= count, (
        f"ids names {ids.shape[1]} experts for a token, but there are {count}; pass at most {count} columns"
    )
    assert routing.weights.shape == ids.shape, (
        f"weights are {routing.weights.shape}, ids are {ids.shape}; pass one weight for each id"
    )
    shape = (count, hidden, inner)
    for matrix in (w_gate, experts.w_up.elements):
        assert matrix.shape == shape, f"w_gate and w_up are {shape}, not {matrix.shape}"
    assert w_down.shape == (count, inner, hidden), (
        f"w_down is [{count}, {inner}, {hidden}], not {w_down.shape}"
    )
    check_stack_scales("w_gate", experts.w_gate)
    check_stack_scales("w_up", experts.w_up)
    check_stack_scales("w_down", experts.w_down)
    assert (experts.b_gate is None) == (experts.b_up is None), (
        "b_gate and b_up come together: pass both, or None for both"
    )
    for bias, columns in ((experts.b_gate, inner), (experts.b_up, inner), (experts.b_down, hidden)):
        if bias is not None:
            assert bias.shape == (count, columns), f"a bias is [{count}, {columns}], not {bias.shape}"


def experts_reference(
    residual: np.ndarray | None, n: np.ndarray, routing: Routing, experts: ExpertWeights, activation: str
) -> np.ndarray:
    """Return y [T, H] in n's dtype, computed token by token in float32, given numpy arrays in the records.

    For several ranks pass the intermediate columns of all of them: the sum over ranks is the product.
    """
    rows = widened(n)
    y = np.zeros_like(rows) if residual is None else widened(residual).copy()
    count = len(experts.w_gate.elements)
    for token, k in np.ndindex(*routing.ids.shape):
        expert = routing.ids[token, k]
        if routing.absent and expert == count:
            continue
        row = rows[token : token + 1]
        gate, up = (
            row @ widen_expert_reference(experts.w_gate, expert),
            row @ widen_expert_reference(experts.w_up, expert),
        )
        if experts.b_gate is not None and experts.b_up is not None:
            gate, up = gate + widened(experts.b_gate[expert]), up + widened(experts.b_up[expert])
        result = (gated_reference(gate, up, activation) @ widen_expert_reference(experts.w_down, expert))[0]
        if experts.b_down is not None:
            result = result + widened(experts.b_down[expert])
        y[token] += routing.weights[token, k] * result
    return y.astype(n.dtype)


def widen_expert_reference(stack: WeightMatrix, expert: int) -> np.ndarray:
    """Return an expert's weight [K, N] of a stack of numpy arrays, its elements times their scales, in float32."""
    elements = stack.elements[expert]
    if stack.block_scales is not None:
        return widen_blocks_reference(elements, stack.block_scales[expert])
    return widened(elements, None if stack.scales is None else stack.scales[expert])


def gated_reference(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """Return the intermediate of an expert in the dtype of its gate and up products: activation(gate) * up."""
    if activation != "swigluoai":
        return activation_reference(gate, activation) * up
    bounded = np.minimum(gate, gate.dtype.type(CLAMPED))
    glu = bounded / (1 + np.exp(-gate.dtype.type(SIGMOID_SCALE) * bounded))
    return glu * (np.clip(up, -CLAMPED, CLAMPED) + 1)

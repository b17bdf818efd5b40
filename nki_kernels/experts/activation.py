"""Activation of experts: the product of the activated gate and of up, with the weights of rows.

*Gate* and *up* are the products of rows with an expert's w_gate and w_up; the *intermediate* is activation(gate) * up,
which w_down multiplies. Tiles are [f in block, block of F, row]: F is on the partitions, in blocks of 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.mlp import activation_function

CLAMPED = 7.0
"""Bound of the clamped gate of gpt-oss, and of its linear part on both sides."""

SIGMOID_SCALE = 1.702
"""Factor of the argument of the clamped gate's sigmoid."""

LARGEST_GATE = CLAMPED * (1.0 / (1.0 + 2.718281828459045 ** (-SIGMOID_SCALE * CLAMPED)))
"""Largest value of the clamped gate times its sigmoid: the product grows with the gate up to CLAMPED."""


@dataclass
class RowWeights(nl.NKIObject):
    """Weights of rows, the same on every partition.

    weights: [128, 1] float32, one weight for all rows, or [128, row] if there is a mask. mask: [128, row] uint8, 0 for
    rows that do not pass the expert, or None.
    """

    weights: nl.NkiTensor
    mask: nl.NkiTensor | None


def activate_pair(gate, up, activation):
    """Return (activated gate, up), two float32 tiles [f in block, block, row] whose product is the intermediate.

    `gate` and `up` are sums in PSUM. The activated gate is a new tile in SBUF; up is returned as it is, except with
    activation "swigluoai": its sums come with 1 added, and a clamped copy in SBUF is returned. The activated gate of
    swigluoai is not bounded yet: `multiply_pair` bounds and multiplies in one instruction.
    """
    first = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf)
    if activation != "swigluoai":
        nisa.activation(dst=first, op=activation_function(activation), data=gate)
        return first, up
    nisa.activation(dst=first, op=nl.sigmoid, data=gate, scale=SIGMOID_SCALE)
    nisa.scalar_tensor_tensor(
        dst=first, data=gate, op0=nl.minimum, operand0=CLAMPED, op1=nl.multiply, operand1=first
    )
    second = nl.ndarray(up.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=second, data=up, op0=nl.minimum, operand0=CLAMPED + 1.0, op1=nl.maximum, operand1=1.0 - CLAMPED
    )
    return first, second


def multiply_pair(target, first, second, activation):
    """Write the product of the two tiles of `activate_pair` to `target` [f in block, block, row], rounded once.

    `target` is in SBUF.
    """
    if activation == "swigluoai":
        nisa.scalar_tensor_tensor(
            dst=target, data=first, op0=nl.minimum, operand0=LARGEST_GATE, op1=nl.multiply, operand1=second
        )
    else:
        nisa.tensor_tensor(dst=target, data1=first, data2=second, op=nl.multiply)


def multiply_weighted_pair(target, first, second, activation, row_weights):
    """Write the product of the two tiles of `activate_pair` times the weight of each row to `target`, rounded once.

    `target` is [f in block, block, row] @ SBUF. Rows with mask 0 keep the contents of the target, even if the tiles are
    infinite or NaN. With activation "swigluoai" the first tile is bounded in place.
    """
    if activation == "swigluoai":
        nisa.tensor_scalar(dst=first, data=first, op0=nl.minimum, operand0=LARGEST_GATE)
    height, count, _ = target.shape
    weights, mask = row_weights.weights, row_weights.mask
    if mask is None:
        nisa.scalar_tensor_tensor(
            dst=target,
            data=first,
            op0=nl.multiply,
            operand0=weights[0:height, :],
            op1=nl.multiply,
            operand1=second,
        )
        return
    product = nl.ndarray(target.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=first, data2=second, op=nl.multiply)
    factor = weights[0:height, :].expand_dim(1).broadcast(1, count)
    rounded = nl.ndarray(target.shape, dtype=target.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=rounded, data1=product, data2=factor, op=nl.multiply)
    chosen = mask[0:height, :].expand_dim(1).broadcast(1, count)
    nisa.tensor_copy_predicated(dst=target, src=rounded, predicate=chosen)

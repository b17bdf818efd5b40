"""The arguments of `mlp`: its weights as records of their kinds, and the checks of shapes and dtypes."""

from __future__ import annotations

import nki.language as nl

from nki_kernels.matmul import MAX_CONTRACTION
from nki_kernels.nibbles import count_stored_rows as count_nibble_rows
from nki_kernels.nibbles import is_packed
from nki_kernels.projection.feed_forward import Weights
from nki_kernels.projection.mx_operands import stores_mx, wrap_mx_matrix
from nki_kernels.tiles import MAX_ROW_BYTES, expect_hidden
from nki_kernels.weights import has_block_scales, is_e4m3, wrap_operand

MAX_MXFP8_HIDDEN = 8192
"""Largest hidden size beside weights in MXFP8, of which SBUF holds 512 columns of gate and up at a time."""

MOST_BLOCKS = 4096
"""Most blocks of a weight with a scale each: 16 KiB of each partition for each of three weights."""


def wrap_mlp_weights(sizes, elements, scales, zeros, block_scales, biases, nibble_dtype, quantises_rows):
    """Return the Weights of a block: WeightMatrix records, or MxMatrix records of weights in an MX format.

    Raises AssertionError if scales or zero points do not fit their weights, if the weights are packed in part, or if
    rows are rounded beside weights that take them as they are.

    Args:
        sizes: (H, F).
        elements, scales, zeros, block_scales: those of w_gate, w_up and w_down @ HBM, or None.
        biases: b_gate, b_up and b_down @ HBM, or None.
        nibble_dtype, quantises_rows: arguments of `mlp`.
    """
    names, depths = ("w_gate", "w_up", "w_down"), (sizes[0], sizes[0], sizes[1])
    matrices = []
    if stores_mx(elements[1]):
        assert quantises_rows, (
            "weights in an MX format are multiplied by rows in MXFP8 alone; pass quantises_rows, or widen the weights"
        )
        assert zeros == (None, None, None), (
            "zero points are those of weights of 4 bits; leave them out beside MX"
        )
        assert block_scales == (None, None, None), (
            "block scales are those of weights of 8 bits; leave them out beside MX"
        )
        most = MAX_MXFP8_HIDDEN if elements[1].dtype == nl.uint32 else 2 * MAX_MXFP8_HIDDEN
        assert sizes[0] <= most, (
            f"mlp takes a hidden size of at most {most} in this MX format, not {sizes[0]}; "
            "widen the weights to bfloat16"
        )
        columns = (sizes[1], sizes[1], sizes[0])
        for index in range(len(names)):
            matrices.append(
                wrap_mx_matrix(names[index], elements[index], scales[index], depths[index], columns[index])
            )
        return Weights(matrices[0], matrices[1], matrices[2], biases[0], biases[1], biases[2])
    for index in range(len(names)):
        matrices.append(
            wrap_operand(
                names[index],
                elements[index],
                depths[index],
                scales[index],
                zeros[index],
                nibble_dtype,
                block_scales[index],
                MOST_BLOCKS,
            )
        )
    assert elements[0] is None or is_packed(elements[0]) == is_packed(elements[1]), (
        "one of gate and up is packed nibbles and the other is not; pack both or neither"
    )
    weights = Weights(matrices[0], matrices[1], matrices[2], biases[0], biases[1], biases[2])
    if quantises_rows:
        check_quantised_rows(weights)
    return weights


def check_arguments(x, weights, norm, outputs):
    """Raise AssertionError if shapes of x, weights, biases and norm do not fit together, or if a size is too large.

    Also if b_gate comes without w_gate. weights: Weights. norm: Norm. outputs: columns of y.
    """
    w_gate = None if weights.w_gate is None else weights.w_gate.elements
    w_up, w_down = weights.w_up.elements, weights.w_down.elements
    hidden = x.shape[1]
    inner = w_up.shape[1]
    hidden_rows, inner_rows = (
        count_stored_rows(weights.w_up, hidden),
        count_stored_rows(weights.w_down, inner),
    )
    norm.check(hidden, x.shape[0])
    wide_rows = norm.bias is not None or weights.b_down is not None or norm.offset != 0.0
    # Block scales stay in SBUF beside the rows.
    wide_rows = wide_rows or (not stores_mx(w_up) and has_block_scales(weights.list_matrices()))
    expect_hidden(
        "mlp", x, hidden, MAX_ROW_BYTES // 2 if wide_rows and x.dtype != nl.float32 else MAX_ROW_BYTES
    )
    assert outputs <= MAX_ROW_BYTES // 4 or outputs == hidden, (
        f"mlp takes at most {MAX_ROW_BYTES // 4} outputs, not {outputs}"
    )
    assert inner <= MAX_CONTRACTION, (
        f"mlp takes an intermediate size of at most {MAX_CONTRACTION}, not {inner}"
    )
    if w_gate is not None:
        assert w_gate.shape[0] == hidden_rows, (
            f"w_gate has {w_gate.shape[0]} rows for a hidden size of {hidden}"
        )
        assert w_gate.shape == w_up.shape, f"w_gate is {w_gate.shape}, w_up is {w_up.shape}"
    assert w_up.shape[0] == hidden_rows, f"w_up has {w_up.shape[0]} rows for a hidden size of {hidden}"
    assert w_down.shape == (inner_rows, outputs), f"w_down is [{inner_rows}, {outputs}], not {w_down.shape}"
    assert w_gate is not None or weights.b_gate is None, (
        "b_gate is given without w_gate; a plain block takes b_up alone"
    )
    expect_row(weights.b_gate, inner, "b_gate")
    expect_row(weights.b_up, inner, "b_up")
    expect_row(weights.b_down, outputs, "b_down")


def count_stored_rows(weight, depth):
    """Return how many rows a weight has @ HBM: those of packed elements, or `depth`.

    weight: WeightMatrix or MxMatrix, whose rows are checked already.
    """
    return (
        weight.elements.shape[0] if stores_mx(weight.elements) else count_nibble_rows(weight.elements, depth)
    )


def check_quantised_rows(weights):
    """Raise AssertionError if the weights of the record Weights are not all float8_e4m3 or all int8, with scales."""
    dtype = weights.w_up.elements.dtype
    for name, weight in (("w_gate", weights.w_gate), ("w_up", weights.w_up), ("w_down", weights.w_down)):
        if weight is not None:
            elements = weight.elements.dtype
            fits = elements == dtype and (is_e4m3(dtype) or dtype == nl.int8)
            assert fits and weight.scales is not None, (
                f"quantises_rows takes float8_e4m3 weights or int8 weights, all with scales; {name} has no scales or "
                f"is {elements} beside w_up of {dtype}; leave quantises_rows out"
            )


def check_row_gate(x, row_gate, b_down):
    """Raise AssertionError if row_gate is given and is not [H, 1], or is given together with b_down."""
    if row_gate is not None:
        assert row_gate.shape == (x.shape[1], 1), f"row_gate is [{x.shape[1]}, 1], not {row_gate.shape}"
        assert b_down is None, "row_gate and b_down are both given; row_gate comes without b_down"


def expect_row(row, columns, name):
    """Raise AssertionError if `row` is neither None nor [1, columns]; `name` names the argument in the message."""
    if row is not None:
        assert row.shape == (1, columns), f"{name} is [1, {columns}], not {row.shape}"

"""per_layer_input: a layer's own input of every token times a gate of the hidden states, projected to their width.

    y = (activation(x @ w_gate) * inputs[:, first : first + P]) @ w_output

Dimensions:
    T   tokens; H hidden size; P width of a layer's input; W width of the inputs of all layers.

Arguments:
    x          [T, H] @ HBM, float32 or bfloat16
    w_gate     [H, P] @ HBM, float32 or bfloat16; read in x's dtype
    inputs     [T, W] @ HBM, x's dtype: the inputs of all layers side by side
    w_output   [P, H] @ HBM, float32 or bfloat16; read in x's dtype
    first      compile-time int: the first of this layer's columns of inputs
    activation "silu", "gelu" (by the error function), "gelu_tanh", "gelu_sigmoid" or "relu"
    returns y  [T, H] @ HBM, x's dtype

Layout
    H on the partitions for the first product, whose stationary operand is x^T. So its result has the tokens on the
    partitions, as the inputs come. The gated input is transposed for the second product, whose result is rows again.

Tiling
    Both weights stay in SBUF. For 128 rows: x and inputs are loaded one row tile ahead, and x is transposed on the
    Tensor engine. The row tile before is multiplied, activated and gated meanwhile. The one before that is transposed,
    multiplied by w_output 512 columns at a time, and stored.
    Two cores of a logical core take half of the rows each; up to 128 rows the first core does the whole.

Limits:
    P up to 512. Both weights together take at most 96 KiB of a partition: 2 * ceil(H / 128) * P elements of x's dtype,
    about. H up to 8192.

Cost
    HBM: both weights, x, the layer's inputs and y once. Bound: DMA. Rounding to x's dtype: the gated input, and y.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import divides_columns, find_core_rows
from nki_kernels.dma import STATIC
from nki_kernels.mlp import activation_function, activation_reference
from nki_kernels.precision import widened
from nki_kernels.projection.products import add_products, allocate_sums
from nki_kernels.projection.row_groups import allocate_transposed, item_bytes, transpose_tiles
from nki_kernels.tiles import BANK, blocks, copy_bank, expect_dims, load, ranges
from nki_kernels.weights import WeightMatrix, load_blocks

cores = (1, 2)

MAX_HIDDEN = 8192

WEIGHT_BYTES = 96 * 1024
"""Most bytes of each partition for both weights; the rows of two row tiles and of results have to fit beside them."""


@nki.jit
def per_layer_input(x, w_gate, inputs, w_output, first=0, activation="gelu_tanh"):
    """Return y [T, H] @ HBM in x's dtype: (activation(x @ w_gate) * inputs[:, first : first + P]) @ w_output.

    On two cores each computes half of the rows, and the first core alone up to 128 rows. Raises
    AssertionError if shapes or dtypes do not fit together, sizes are above the limits, or the activation is
    unknown.
    """
    expect_dims(2, x, "x [T, H]")
    expect_dims(2, w_gate, "w_gate [H, P]")
    tokens, hidden = x.shape
    width = w_gate.shape[1]
    check_arguments(x, w_gate, inputs, w_output, first)
    y = nl.ndarray((tokens, hidden), dtype=x.dtype, buffer=nl.shared_hbm)
    if divides_columns(tokens) and nl.program_id(0) > 0:
        return y
    start, end = find_core_rows(tokens)
    tiles = ranges(start, end)
    layer_inputs = inputs[:, first : first + width]
    ahead = load_rows(x, layer_inputs, tiles[0])
    gate = load_blocks(WeightMatrix(w_gate), x.dtype, STATIC)
    output = load_blocks(WeightMatrix(w_output), x.dtype, STATIC)
    function = activation_function(activation)
    waiting, gated = None, None
    for number in range(len(tiles) + 2):
        following = None
        if number < len(tiles):
            rows, gates = ahead
            if number + 1 < len(tiles):
                ahead = load_rows(x, layer_inputs, tiles[number + 1])
            following = (transpose_tile(rows), gates)
        before = gated
        if number > 0 and number <= len(tiles):
            gated = gate_rows(waiting[0], waiting[1], gate, hidden, function)
        if number > 1:
            row, last = tiles[number - 2]
            nisa.dma_copy(dst=y[row:last, :], src=project_gated(before, output))
        waiting = following
    return y


def check_arguments(x, w_gate, inputs, w_output, first):
    """Raise AssertionError if shapes or dtypes do not fit together, or if H, P or the weights' bytes are too many."""
    tokens, hidden = x.shape
    width = w_gate.shape[1]
    assert hidden <= MAX_HIDDEN, f"per_layer_input takes a hidden size of at most {MAX_HIDDEN}, not {hidden}"
    assert width <= BANK, f"per_layer_input takes inputs of at most {BANK} elements, not {width}"
    assert w_gate.shape[0] == hidden, f"w_gate has {w_gate.shape[0]} rows for a hidden size of {hidden}"
    assert w_output.shape == (width, hidden), f"w_output is [{width}, {hidden}], not {w_output.shape}"
    assert inputs.shape[0] == tokens and first >= 0 and first + width <= inputs.shape[1], (
        f"inputs are [{tokens}, {first + width} or more], not {inputs.shape}"
    )
    assert inputs.dtype == x.dtype, f"inputs are {inputs.dtype}, x is {x.dtype}"
    weight_bytes = item_bytes(x.dtype) * (blocks(hidden) * width + blocks(width) * hidden)
    assert weight_bytes <= WEIGHT_BYTES, (
        f"weights of [{hidden}, {width}] take {weight_bytes} bytes of a partition, more than {WEIGHT_BYTES}"
    )


def load_rows(x, inputs, rows):
    """Load rows (first, last) of x and of the inputs from HBM into two new SBUF tiles [row, column]; return both."""
    first, last = rows
    return load(x[first:last, :], x.dtype), load(inputs[first:last, :], inputs.dtype)


def transpose_tile(rows):
    """Return the transpose of an SBUF tile [row, K] as a new SBUF tile [k in block, block, row]."""
    result = allocate_transposed(rows.shape[1], rows.shape[0], rows.dtype)
    transpose_tiles(result, [rows], 0)
    return result


def gate_rows(across, inputs, gate, hidden, function):
    """Return activation(rows @ gate) * inputs as a new SBUF tile [row, P] in the dtype of inputs.

    Args:
        across: the rows transposed, SBUF tile [h in block, block, row].
        inputs: SBUF tile [row, P].
        gate: w_gate in SBUF, [h in block, block, P].
        hidden: H.
        function: activation function of the Scalar engine.
    """
    count, width = inputs.shape
    sums = allocate_sums([(0, count)], [(0, width)])
    add_products(sums, across, [(0, count)], gate, [(0, width)], 0, hidden)
    active = nl.ndarray((count, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=active, op=function, data=sums[0][0])
    gated = nl.ndarray((count, width), dtype=inputs.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=gated, data1=active, data2=inputs, op=nl.multiply)
    return gated


def project_gated(gated, output):
    """Return gated @ output as a new SBUF tile [row, H] in the dtype of `gated`.

    gated: SBUF tile [row, P]. output: w_output in SBUF, [p in block, block, H].
    """
    count, width = gated.shape
    hidden = output.shape[2]
    across = transpose_tile(gated)
    result = nl.ndarray((count, hidden), dtype=gated.dtype, buffer=nl.sbuf)
    panels = ranges(0, hidden, BANK)
    for number in range(len(panels)):
        left, right = panels[number]
        sums = allocate_sums([(0, count)], [(left, right)])
        add_products(sums, across, [(0, count)], output, [(left, right)], 0, width)
        copy_bank(result[:, left:right], sums[0][0], number, 2)
    return result


def per_layer_input_reference(
    x: np.ndarray,
    w_gate: np.ndarray,
    inputs: np.ndarray,
    w_output: np.ndarray,
    first: int = 0,
    activation: str = "gelu_tanh",
) -> np.ndarray:
    """Return (activation(x @ w_gate) * inputs[:, first : first + P]) @ w_output in x's dtype, computed in float32.

    P is the number of columns of w_gate. Only the result is rounded.
    """
    gate = activation_reference(widened(x) @ widened(w_gate), activation)
    layer_inputs = widened(inputs[:, first : first + w_gate.shape[1]])
    return ((gate * layer_inputs) @ widened(w_output)).astype(x.dtype)

"""causal_conv1d: a convolution along the tokens of each sequence, every channel by itself, with a state.

    y[t, c] = activation(bias[c] + sum over k of weight[k, c] * input[t - (K - 1) + k, c])

The input of a sequence is its state, K - 1 rows, and then its tokens. The state becomes the last K - 1 rows before the
padding.

Dimensions:
    T   tokens of B sequences, n = T / B of each; C channels; K taps (the kernel size); S slots of states.

Arguments:
    x            [T, W] @ HBM, float32 or bfloat16: its columns from `first` on are the C channels
    weight       [K, C] @ HBM, float32 or bfloat16; read in x's dtype
    bias         [1, C] @ HBM, float32 or bfloat16, or None; read in x's dtype
    state        [S, K - 1, C] @ HBM, x's dtype; updated in place
    state_slots  [B, 1] @ HBM, int32: the slot of each sequence, all different
    starts       [B, 1] @ HBM, int32: the position of its first token here; where it is 0 the state counts as zeros
    counts       [B, 1] @ HBM, int32: its tokens, up to n; the others are padding, which changes no state
    first        compile-time int
    activation   "silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", or None
    returns y    [T, C] @ HBM, x's dtype; and the state

Layout
    Prompts: rows are transposed, so that channels lie on the partitions and a tap is a shift along the free dim. A
    matmul of a shifted tile, stationary, with a diagonal of weights multiplies by a tap and transposes back; K of them
    add up in PSUM. One token of each sequence: taps are different rows, and the Vector engine multiplies and adds with
    channels on the partitions, the sequences of up to 128 along the free dim.

Tiling
    Panels of up to 4096 channels (float32: 2048), whose diagonals stay in SBUF. In each of them row tiles of 128 tokens
    of all sequences, loaded one ahead, in bfloat16 transposed by DMA, else on the Tensor engine; 512 channels at a time
    are multiplied, get their bias on the Vector engine as they leave PSUM, are activated, and stored. States are
    updated, and the next panel prepared, in the middle of the last sequence.
    Two cores of a logical core take half of the channels each.

Limits:
    K from 2 to 8. T and S (K - 1) up to 2^23.

Cost
    HBM: x and y once, weights and bias once, states of the sequences read twice and written once. Bound: for prompts
    the Tensor engine, K passes over x. Predicted on trn2 for 8192 channels, K = 4 and 2048 tokens in bfloat16:
    270 us, for 240 of which the Tensor engine is busy; the bytes take 188.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.cores import find_core_range
from nki_kernels.mlp import activation_function, activation_reference
from nki_kernels.precision import widened
from nki_kernels.projection.row_groups import allocate_transposed, item_bytes
from nki_kernels.recurrent.conv_prompt import ConvArguments, convolve_prompts
from nki_kernels.recurrent.diagonal import load_columns
from nki_kernels.recurrent.slots import (
    SequenceTable,
    check_table,
    load_column,
    mask_slots,
    split_sequences,
    view_state_rows,
)
from nki_kernels.tiles import BANK, PARTITIONS, expect_dims, filled, load, ranges, transpose_rows

cores = (1, 2)

MOST_TAPS = 8

FEW_SEQUENCES = 32
"""Up to which the rows of one token are taken in wide panels."""

ROW_BYTES = 16384
"""Of a row, in a wide panel; a quarter of that for more sequences."""


@nki.jit
def causal_conv1d(
    x,
    weight,
    bias,
    state: nt.mutable_tensor,
    state_slots,
    starts,
    counts,
    first=0,
    activation="silu",
):
    """Convolve each channel of x along the tokens of each sequence, and apply the activation.

    Returns y [T, C] in x's dtype, and `state`, of which the slots in `state_slots` are updated. The
    module docstring describes the arguments and limits; AssertionError if the arguments violate them.
    """
    expect_dims(2, x, "x [T, W]")
    expect_dims(2, weight, "weight [K, C]")
    function = nl.copy if activation is None else activation_function(activation)
    table = SequenceTable(state_slots, starts, counts)
    arguments = ConvArguments(x, weight, bias, state, table, first, function)
    sequences = check_arguments(arguments)
    y = nl.ndarray((x.shape[0], weight.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    begin, end = find_core_range(weight.shape[1], PARTITIONS, nl.program_id(0))
    if x.shape[0] > sequences:
        convolve_prompts(y, arguments, (begin, end))
        return y, state
    most = ROW_BYTES // item_bytes(x.dtype) // (1 if sequences <= FEW_SEQUENCES else 4)
    for panel in ranges(begin, end, most):
        across = load_columns((weight,) if bias is None else (weight, bias), panel, x.dtype)
        for group in split_sequences(sequences):
            convolve_token(y, arguments, across, group, panel)
    return y, state


def check_arguments(arguments):
    """Return the number of sequences, or raise AssertionError if shapes do not fit together or exceed the limits."""
    x, bias, state, first = arguments.x, arguments.bias, arguments.state, arguments.first
    taps, channels = arguments.weight.shape
    assert 2 <= taps <= MOST_TAPS, f"causal_conv1d takes 2 to {MOST_TAPS} taps, not {taps}"
    assert first >= 0 and first + channels <= x.shape[1], (
        f"x has {x.shape[1]} columns, not all of {first} to {first + channels - 1}: change first or weight"
    )
    expect_dims(3, state, "state [S, K - 1, C]")
    assert state.shape[1:] == (taps - 1, channels), (
        f"state has to be [S, {taps - 1}, {channels}], not {state.shape}"
    )
    assert state.dtype == x.dtype, f"state is {state.dtype}, x is {x.dtype}; both need one dtype"
    if bias is not None:
        assert bias.shape == (1, channels), f"bias has to be [1, {channels}], not {bias.shape}"
    return check_table(x.shape[0], state, arguments.table)


def convolve_token(y, arguments, across, group, panel):
    """Compute y for one token of each sequence of a group, and shift their states in HBM by that token.

    Sequences with a start of 0 read zeros as their state; states of sequences with a count of 0 are not
    written.

    Args:
        across: weights and bias as columns [c in block, block, K or K + 1] float32, see `load_columns`.
        group: sequences (first, end).
        panel: channels (first, end), which are also the columns of y.
    """
    (start, end), (left, right) = group, panel
    x, state, table, first = arguments.x, arguments.state, arguments.table, arguments.first
    slots, height, _ = state.shape
    numbers = load_column(table.state_slots, start, end)
    read = mask_slots(numbers, load_column(table.starts, start, end), slots)
    written = mask_slots(numbers, load_column(table.counts, start, end), slots)
    old = filled((end - start, height, right - left), 0.0, state.dtype)
    nisa.dma_copy(dst=old, src=view_state_rows(state, read, 0, height, panel), oob_mode=nisa.oob_mode.skip)
    new = load(x[start:end, first + left : first + right], x.dtype)
    if height > 1:
        moved = view_state_rows(state, written, 0, height - 1, panel)
        nisa.dma_copy(dst=moved, src=old[:, 1:height, :], oob_mode=nisa.oob_mode.skip)
    last = view_state_rows(state, written, height - 1, height, panel)
    nisa.dma_copy(dst=last, src=new, oob_mode=nisa.oob_mode.skip)
    nisa.dma_copy(dst=y[start:end, left:right], src=sum_taps(old, new, across, arguments.function))


def sum_taps(old, new, across, function):
    """Return rows [sequence, column] of y in SBUF: activation(sum over taps of row * weight, plus the bias).

    Args:
        old: the states, [sequence, K - 1, column]: the rows of the first K - 1 taps.
        new: the new tokens [sequence, column]: the row of the last tap.
        across: weights and bias as columns [c in block, block, K or K + 1] float32.
        function: the activation, an `nl` function.
    """
    sequences, height, width = old.shape
    shape = (across.shape[0], across.shape[1], sequences)
    sums = filled(shape, 0.0)
    if across.shape[2] > height + 1:
        nisa.tensor_copy(dst=sums, src=across[:, :, height + 1 : height + 2].broadcast(2, sequences))
    for tap in range(height + 1):
        tile = allocate_transposed(width, sequences, old.dtype)
        transpose_rows(tile, 0, old[:, tap, :] if tap < height else new, 2)
        product = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        weights = across[:, :, tap : tap + 1].broadcast(2, sequences)
        nisa.tensor_tensor(dst=product, data1=tile, data2=weights, op=nl.multiply)
        nisa.tensor_tensor(dst=sums, data1=sums, data2=product, op=nl.add)
    active = nl.ndarray(shape, dtype=old.dtype, buffer=nl.sbuf)
    nisa.activation(dst=active, op=function, data=sums)
    result = nl.ndarray((sequences, width), dtype=old.dtype, buffer=nl.sbuf)
    for first, last in ranges(0, width, BANK):
        bank = nl.ndarray((sequences, last - first), dtype=old.dtype, buffer=nl.psum)
        for start, end in ranges(first, last):
            block = active[0 : end - start, start // PARTITIONS, :]
            nisa.nc_transpose(dst=bank[:, start - first : end - first], data=block)
        nisa.tensor_copy(dst=result[:, first:last], src=bank)
    return result


def causal_conv1d_reference(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    state: np.ndarray,
    state_slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    first: int = 0,
    activation: str | None = "silu",
) -> tuple[np.ndarray, np.ndarray]:
    """Compute y and the states with NumPy in float32, sequence by sequence; `state` is updated in place."""
    taps, channels = weight.shape
    y = np.empty((len(x), channels), x.dtype)
    tokens = len(x) // len(state_slots)
    for number, (slot, start, count) in enumerate(np.hstack([state_slots, starts, counts])):
        rows = slice(number * tokens, (number + 1) * tokens)
        before = state[slot] if start else np.zeros_like(state[slot])
        inputs = np.concatenate([before, x[rows, first : first + channels]])
        summed = sum(widened(inputs[tap : tap + tokens]) * widened(weight[tap]) for tap in range(taps))
        summed = summed if bias is None else summed + widened(bias)
        y[rows] = summed if activation is None else activation_reference(summed, activation)
        if count:
            state[slot] = inputs[count : count + taps - 1]
    return y, state

"""causal_conv1d: a convolution along the tokens of each sequence, every channel by itself, with a state.

    y[t, c] = activation(bias[c] + sum over k of weight[k, c] * input[t - (K - 1) + k, c])

The input of a sequence is its state, K - 1 rows, and then its tokens. The state becomes the last K - 1 rows before the
padding.

Dimensions
    T   tokens of B sequences, n = T / B of each; C channels; K taps (the kernel size); S slots of states.

Arguments
    x            [T, W] @ HBM, float32 or bfloat16: its columns from `first` on are the C channels
    weight       [K, C] @ HBM, float32 or bfloat16; read in x's dtype
    bias         [1, C] @ HBM, float32 or bfloat16, or None; read in x's dtype
    state        [S, K - 1, C] @ HBM, x's dtype; updated in place
    state_slots  [B, 1] @ HBM, int32: the slot of each sequence, all different
    starts       [B, 1] @ HBM, int32: the position of its first token here; where it is 0 the state counts as zeros
    counts       [B, 1] @ HBM, int32: its tokens, up to n; the others are padding, which changes no state
    first        compile-time int
    activation   "silu", "gelu", "gelu_tanh", "relu", or None
    returns y    [T, C] @ HBM, x's dtype; and the state

Layout
    Prompts: rows are transposed, so that channels lie on the partitions and a tap is a shift along the free dim. A
    matmul of a shifted tile, stationary, with a diagonal of weights multiplies by a tap and transposes back; K of them
    add up in PSUM. One token of each sequence: taps are different rows, and the Vector engine multiplies and adds with
    channels on the partitions, the sequences of up to 128 along the free dim.

Tiling
    Panels of 4096 channels (float32: 2048), whose diagonals stay in SBUF. For each sequence row tiles of 128 tokens,
    loaded one ahead, in bfloat16 transposed by DMA, else on the Tensor engine; 512 channels at a time are multiplied,
    get their bias on the Vector engine as they leave PSUM, are activated, and stored. States are updated at the end.
    Two cores of a logical core take half of the channels each.

Limits
    K from 2 to 8. T and S (K - 1) up to 2^23.

Cost
    HBM: x and y once, weights and bias once, states of the sequences read twice and written once. Bound: for prompts
    DMA and Tensor engine alike. Predicted on trn2 for 8192 channels, K = 4 and 2048 tokens in bfloat16: 265 us, of
    which the bytes take 188.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.cores import part
from nki_kernels.mlp import activation_function, activation_reference
from nki_kernels.precision import widened
from nki_kernels.projection.normalised_rows import on_every_row, transpose_rows
from nki_kernels.projection.products import transpose_part
from nki_kernels.projection.row_groups import blocks_tile, item_bytes
from nki_kernels.recurrent.diagonal import columns_of, diagonals
from nki_kernels.recurrent.slots import (
    below,
    check_places,
    column,
    row,
    sequence_groups,
    slots_or_none,
    total,
)
from nki_kernels.tiles import BANK, PARTITIONS, expect_dims, load, ranges, transpose_into

MOST_TAPS = 8

PANEL_BYTES = 8192
"""Of a row of a panel, whose diagonals lie in SBUF together: 8 KiB of a partition for each tap."""

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
    """A convolution along the tokens of each sequence, every channel by itself."""
    expect_dims(2, x, "x [T, W]")
    expect_dims(2, weight, "weight [K, C]")
    tokens = x.shape[0]
    sequences = check_arguments(x, weight, bias, state, state_slots, starts, counts, first)
    function = nl.copy if activation is None else activation_function(activation)
    y = nl.ndarray((tokens, weight.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    begin, end = part(weight.shape[1], PARTITIONS, nl.program_id(0))
    places = (state_slots, starts, counts)
    if tokens == sequences:
        most = ROW_BYTES // item_bytes(x.dtype) // (1 if sequences <= FEW_SEQUENCES else 4)
        for panel in ranges(begin, end, most):
            across = columns_of((weight,) if bias is None else (weight, bias), panel, x.dtype)
            for group in sequence_groups(sequences):
                one_token(y, x, state, across, places, group, panel, first, function)
        return y, state
    context = context_rows(state, state_slots, starts)
    panels = ranges(begin, end, PANEL_BYTES // item_bytes(x.dtype))
    for panel in panels:
        products = diagonals(columns_of((weight,), panel, x.dtype), x.dtype)
        added = None
        if bias is not None:
            added = on_every_row(bias[:, panel[0] : panel[1]], PARTITIONS, nl.float32, 0.0)
        for sequence in range(sequences):
            rows = load_context(state, context, sequence, panel)
            prompt(y, x, rows, products, added, sequences, sequence, panel, first, function)
    for group in sequence_groups(sequences):
        for panel in panels:
            update(state, x, places, group, panel, first)
    return y, state


def check_arguments(x, weight, bias, state, state_slots, starts, counts, first):
    """The number of sequences; refuse shapes that do not fit together, and sizes beyond the limits."""
    taps, channels = weight.shape
    assert 2 <= taps <= MOST_TAPS, f"causal_conv1d takes 2 to {MOST_TAPS} taps, not {taps}"
    assert first >= 0 and first + channels <= x.shape[1], (
        f"channels {first} to {first + channels} of rows of {x.shape[1]}"
    )
    expect_dims(3, state, "state [S, K - 1, C]")
    assert state.shape[1:] == (taps - 1, channels), f"state is [S, {taps - 1}, {channels}], not {state.shape}"
    assert state.dtype == x.dtype, f"state is {state.dtype}, x is {x.dtype}"
    if bias is not None:
        assert bias.shape == (1, channels), f"bias is [1, {channels}], not {bias.shape}"
    return check_places(x.shape[0], state, state_slots, starts, counts)


def context_rows(state, state_slots, starts):
    """The numbers of the rows of each sequence's state among those of all slots: [K - 1, B] int32."""
    height = state.shape[1]
    numbers = row(state_slots, height)
    scaled = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    within = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, numbers.shape[1]]], channel_multiplier=1)
    nisa.scalar_tensor_tensor(
        dst=scaled, data=numbers, op0=nl.multiply, operand0=float(height), op1=nl.add, operand1=within
    )
    return slots_or_none(scaled, row(starts, height), state.shape[0] * height)


def load_context(state, context, sequence, panel):
    """A panel of the state of a sequence, one row on each partition: [K - 1, columns]."""
    slots, height, channels = state.shape
    left, right = panel
    tile = nl.ndarray((height, right - left), dtype=state.dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.0)
    source = state.reshape((slots * height, channels)).ap(
        pattern=[[channels, height], [1, right - left]],
        offset=left,
        vector_offset=context[:, sequence : sequence + 1],
    )
    nisa.dma_copy(dst=tile, src=source, oob_mode=nisa.oob_mode.skip)
    return tile


def prompt(y, x, rows, products, added, sequences, sequence, panel, first, function):
    """The tokens of a sequence; `rows` are those of its state."""
    each = x.shape[0] // sequences
    left, right = panel
    height = rows.shape[0]
    before = blocks_tile(right - left, height, x.dtype)
    transpose_into(before, 0, 0, rows)
    tiles = ranges(sequence * each, (sequence + 1) * each)
    waiting = None
    # Two places in turn, so that the Vector engine need not wait for the Scalar engine.
    places = []
    for _ in range(2):
        places.append(nl.ndarray((PARTITIONS, BANK), dtype=nl.float32, buffer=nl.sbuf))
    ahead = load_across(x[tiles[0][0] : tiles[0][1], first + left : first + right], height)
    for number in range(len(tiles)):
        start, end = tiles[number]
        across = ahead
        if number + 1 < len(tiles):
            after = tiles[number + 1]
            ahead = load_across(x[after[0] : after[1], first + left : first + right], height)
        nisa.tensor_copy(dst=across[:, :, 0:height], src=before)
        before = across[:, :, end - start : end - start + height]
        result = nl.ndarray((end - start, right - left), dtype=x.dtype, buffer=nl.sbuf)
        for columns in ranges(0, right - left, BANK):
            bank = multiplied(across, products, columns, end - start)
            finish(waiting, y, added, function, places)
            places.reverse()
            waiting = (bank, result, (start, end), columns, panel)
    finish(waiting, y, added, function, places)


def load_across(rows, height):
    """Rows [row, column] of HBM, transposed, behind room for `height` others: [c in block, block, row]."""
    across = blocks_tile(rows.shape[1], height + rows.shape[0], rows.dtype)
    own = across[:, :, height : height + rows.shape[0]]
    if rows.dtype == nl.float32:
        transpose_rows(own, 0, load(rows, rows.dtype), 2)
    else:
        transpose_part(own, rows, 0)
    return across


def multiplied(across, products, columns, rows):
    """K products of each block of some columns of the panel: [row, column] @ PSUM."""
    first, last = columns
    bank = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.psum)
    for start, end in ranges(first, last):
        block, used = start // PARTITIONS, end - start
        for tap in range(products.shape[2]):
            nisa.nc_matmul(
                dst=bank[:, start - first : end - first],
                stationary=across[0:used, block, tap : tap + rows],
                moving=products[0:used, block, tap, 0:used],
                accumulate=tap > 0,
            )
    return bank


def finish(waiting, y, added, function, places):
    """Bias and activation of columns that are in PSUM, while the next ones are multiplied; last the store."""
    if waiting is None:
        return
    bank, result, rows, columns, panel = waiting
    first, last = columns
    sums = bank
    if added is not None:
        sums = places[0][0 : bank.shape[0], 0 : last - first]
        nisa.tensor_tensor(dst=sums, data1=bank, data2=added[0 : bank.shape[0], first:last], op=nl.add)
    nisa.activation(dst=result[:, first:last], op=function, data=sums)
    if last == result.shape[1]:
        nisa.dma_copy(dst=y[rows[0] : rows[1], panel[0] : panel[1]], src=result)


def one_token(y, x, state, across, places, group, panel, first, function):
    """One token of each sequence of a group: y, and the states moved on by a row."""
    start, end = group
    left, right = panel
    slots, height, _ = state.shape
    numbers = column(places[0], start, end)
    read = slots_or_none(numbers, column(places[1], start, end), slots)
    written = slots_or_none(numbers, column(places[2], start, end), slots)
    old = nl.ndarray((end - start, height, right - left), dtype=state.dtype, buffer=nl.sbuf)
    nisa.memset(dst=old, value=0.0)
    nisa.dma_copy(dst=old, src=state_rows(state, read, 0, height, panel), oob_mode=nisa.oob_mode.skip)
    new = load(x[start:end, first + left : first + right], x.dtype)
    if height > 1:
        moved = state_rows(state, written, 0, height - 1, panel)
        nisa.dma_copy(dst=moved, src=old[:, 1:height, :], oob_mode=nisa.oob_mode.skip)
    last = state_rows(state, written, height - 1, height, panel)
    nisa.dma_copy(dst=last, src=new, oob_mode=nisa.oob_mode.skip)
    nisa.dma_copy(dst=y[start:end, left:right], src=taps_of_one(old, new, across, function))


def state_rows(state, numbers, begin, end, panel):
    """Some rows of the states of a group, by their slots: [sequence, row, column] in HBM."""
    _, height, channels = state.shape
    left, right = panel
    pattern = [[height * channels, numbers.shape[0]], [channels, end - begin], [1, right - left]]
    return state.ap(pattern=pattern, offset=begin * channels + left, vector_offset=numbers)


def taps_of_one(old, new, across, function):
    """The rows [sequence, column] that follow from old rows [sequence, row, column] and new ones."""
    sequences, height, width = old.shape
    shape = (across.shape[0], across.shape[1], sequences)
    sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sums, value=0.0)
    if across.shape[2] > height + 1:
        nisa.tensor_copy(dst=sums, src=across[:, :, height + 1 : height + 2].broadcast(2, sequences))
    for tap in range(height + 1):
        tile = blocks_tile(width, sequences, old.dtype)
        if width % shape[0] != 0:
            nisa.memset(dst=tile, value=0.0)
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
            own = active[0 : end - start, start // PARTITIONS, :]
            nisa.nc_transpose(dst=bank[:, start - first : end - first], data=own)
        nisa.tensor_copy(dst=result[:, first:last], src=bank)
    return result


def update(state, x, places, group, panel, first):
    """The states of a group: the last K - 1 rows of state and tokens that are no padding."""
    start, end = group
    left, right = panel
    slots, height, channels = state.shape
    each = x.shape[0] // places[0].shape[0]
    from_state, from_tokens = sources(state, places, group, each, x.shape[0])
    shape = (end - start, height, right - left)
    old = nl.ndarray(shape, dtype=state.dtype, buffer=nl.sbuf)
    new = nl.ndarray(shape, dtype=state.dtype, buffer=nl.sbuf)
    nisa.memset(dst=old, value=0.0)
    nisa.memset(dst=new, value=0.0)
    rows = state.reshape((slots * height, channels))
    for place in range(height):
        kept = numbered_rows(rows, from_state[:, place : place + 1], left, right)
        nisa.dma_copy(dst=old[:, place, :], src=kept, oob_mode=nisa.oob_mode.skip)
        given = numbered_rows(x, from_tokens[:, place : place + 1], first + left, first + right)
        nisa.dma_copy(dst=new[:, place, :], src=given, oob_mode=nisa.oob_mode.skip)
    nisa.tensor_tensor(dst=new, data1=old, data2=new, op=nl.add)
    own = slots_or_none(column(places[0], start, end), column(places[2], start, end), slots)
    nisa.dma_copy(dst=state_rows(state, own, 0, height, panel), src=new, oob_mode=nisa.oob_mode.skip)


def numbered_rows(table, numbers, left, right):
    """The columns left … right of the rows of some numbers: [N, columns] in HBM."""
    pattern = [[table.shape[1], numbers.shape[0]], [1, right - left]]
    return table.ap(pattern=pattern, offset=left, vector_offset=numbers)


def sources(state, places, group, each, tokens):
    """Where the rows of new states come from, [sequence, row] int32: rows of all states, and rows of x.

    Row j is row j + count of state and tokens together. One of the two numbers is beyond all rows; both are where the
    row is one of zeros.
    """
    start, end = group
    slots, height, _ = state.shape
    shape = (end - start, height)
    place = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=place, pattern=[[1, height]])
    nisa.tensor_scalar(dst=place, data=place, op0=nl.add, operand0=column(places[2], start, end))
    base = nl.ndarray((end - start, 1), dtype=nl.float32, buffer=nl.sbuf)
    numbers = column(places[0], start, end)
    fresh = below(column(places[1], start, end), 1.0, slots * height)
    nisa.scalar_tensor_tensor(
        dst=base, data=numbers, op0=nl.multiply, operand0=float(height), op1=nl.add, operand1=fresh
    )
    beyond = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=beyond,
        data=place,
        op0=nl.greater_equal,
        operand0=float(height),
        op1=nl.multiply,
        operand1=2.0**23,
    )
    old = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=old, data=place, op0=nl.add, operand0=base)
    token = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=token, pattern=[[0, height]], offset=start * each - height, channel_multiplier=each)
    token = total(token, place, nl.float32)
    return total(old, beyond, nl.int32), total(token, below(place, float(height), tokens + height), nl.int32)


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
    """The formula in float32, sequence by sequence; the state is updated in place."""
    taps, channels = weight.shape
    y = np.empty((len(x), channels), x.dtype)
    each = len(x) // len(state_slots)
    for number, (slot, start, count) in enumerate(np.hstack([state_slots, starts, counts])):
        rows = slice(number * each, (number + 1) * each)
        before = state[slot] if start else np.zeros_like(state[slot])
        given = np.concatenate([before, x[rows, first : first + channels]])
        summed = sum(widened(given[tap : tap + each]) * widened(weight[tap]) for tap in range(taps))
        summed = summed if bias is None else summed + widened(bias)
        y[rows] = summed if activation is None else activation_reference(summed, activation)
        if count:
            state[slot] = given[count : count + taps - 1]
    return y, state

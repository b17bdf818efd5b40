"""Where the states of sequences lie: numbers of slots, which are read at run time.

`causal_conv1d`, `selective_scan` and `ssd` keep the state of a sequence in a slot of an HBM tensor. A state
that counts as zeros, or that is not to be written, gets a number beyond all slots, which a DMA skips. Numbers
are computed in float32, which holds those below 2^24 exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import expect_dims, load, ranges


@dataclass
class SequenceTable(nl.NKIObject):
    """Run-time numbers of sequences, [B, 1] int32 in HBM: slots of states, first positions, counts of new tokens."""

    state_slots: nl.NkiTensor
    starts: nl.NkiTensor
    counts: nl.NkiTensor


@dataclass
class ScanArguments(nl.NKIObject):
    """The arguments of `selective_scan`, whose file describes them."""

    u: nl.NkiTensor
    projected: nl.NkiTensor
    w_dt: nl.NkiTensor
    dt_bias: nl.NkiTensor
    a_log: nl.NkiTensor
    d: nl.NkiTensor
    gate: nl.NkiTensor
    gate_first: int
    state: nl.NkiTensor
    table: SequenceTable


def check_table(tokens, state, table):
    """Return the number of sequences, B.

    Args:
        tokens: the rows of all sequences together.
        state: the states, [slots, ...].

    Raises:
        AssertionError: state_slots, starts or counts are not [B, 1], B does not divide the tokens, or there
            are more than 2^23 tokens or rows of states (slots times their first dim).
    """
    state_slots = table.state_slots
    expect_dims(2, state_slots, "state_slots [B, 1]")
    sequences = state_slots.shape[0]
    for name, numbers in (("state_slots", state_slots), ("starts", table.starts), ("counts", table.counts)):
        assert numbers.shape == (sequences, 1), (
            f"{name} are [{sequences}, 1], not {numbers.shape}: pass one number for each sequence"
        )
    assert tokens % sequences == 0, (
        f"{tokens} tokens of {sequences} sequences: pad the sequences, so that all have equally many rows"
    )
    elements = 1
    for size in state.shape[1:]:
        elements = elements * size
    most = 2**23 // state.shape[1]
    assert state.shape[0] <= most, (
        f"states of {elements} elements lie in at most {most} slots, not {state.shape[0]}: "
        "their rows are counted in float32; pass fewer slots"
    )
    assert tokens <= 2**23, (
        f"at most {2**23} tokens, not {tokens}: divide the sequences over several launches"
    )
    return sequences


def load_column(numbers, first, last):
    """Load numbers first … last - 1 of [B, 1] in HBM, one on each partition: a float32 SBUF tile [last - first, 1]."""
    return load(numbers[first:last, :], nl.float32)


def load_repeated_row(numbers, height):
    """Load numbers [B, 1] of HBM to each of `height` partitions: a float32 SBUF tile [height, B] with equal rows."""
    sequences = numbers.shape[0]
    raw = load(numbers.ap(pattern=[[0, height], [1, sequences]]), numbers.dtype)
    wide = nl.ndarray(raw.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide, src=raw)
    return wide


def view_state_rows(state, numbers, begin, end, panel):
    """Return a view of rows begin … end - 1 of some slots' states in HBM: [sequence, row, channel].

    Args:
        state: all states, [slots, row, channel].
        numbers: the slots, [sequence, 1] int32 in SBUF, read at run time.
        panel: (first, end) of the channels.
    """
    _, height, channels = state.shape
    left, right = panel
    pattern = [[height * channels, numbers.shape[0]], [channels, end - begin], [1, right - left]]
    return state.ap(pattern=pattern, offset=begin * channels + left, vector_offset=numbers)


def load_row(numbers):
    """Load numbers [B, 1] of HBM to one partition: an int32 SBUF tile [1, B]."""
    return load(numbers.ap(pattern=[[0, 1], [1, numbers.shape[0]]]), nl.int32)


def select_below(numbers, limit, value):
    """Return `value` where a number is below `limit`, else 0: a new float32 SBUF tile of the shape of `numbers`."""
    result = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result, data=numbers, op0=nl.less, operand0=limit, op1=nl.multiply, operand1=float(value)
    )
    return result


def add_numbers(first, second, dtype):
    """Return first + second, a new SBUF tile of a dtype."""
    result = nl.ndarray(first.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=first, data2=second, op=nl.add)
    return result


def mask_slots(slots, numbers, count):
    """Return the slots, but one beyond all `count` slots where a number is 0: a new int32 SBUF tile.

    A DMA skips such a slot.

    Args:
        slots: [rows, columns] float32; `count` is added to those that are masked.
        numbers: of the same shape: starts, or counts of new tokens.
        count: the number of all slots, or of what `slots` index.
    """
    return add_numbers(slots, select_below(numbers, 1.0, count), nl.int32)


def choose_product_dtype(rows, weight):
    """Return the dtype for the operands of a product of `rows` and `weight`: theirs if they agree, else float32."""
    return rows.dtype if rows.dtype == weight.dtype else nl.float32


def split_sequences(sequences):
    """Return ranges (first, end) of up to 128 of the sequences, as many as there are partitions."""
    return ranges(0, sequences)

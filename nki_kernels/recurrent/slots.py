"""Where the states of sequences lie: numbers of slots, which are read at run time.

A state that counts as zeros, or that is not to be written, gets a number beyond all slots, which a DMA skips. Numbers
are worked out in float32, which holds those below 2^24 exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import expect_dims, load, ranges


@dataclass
class SequenceTable(nl.NKIObject):
    """Run-time numbers of sequences, [B, 1] int32 @ HBM each: slots of states, first positions, and new tokens."""

    state_slots: nl.NkiTensor
    starts: nl.NkiTensor
    counts: nl.NkiTensor


@dataclass
class ScanArguments(nl.NKIObject):
    """The arguments of `selective_scan`, which describes them."""

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
    """Return the number of sequences.

    Refuses run-time numbers of other shapes, and tokens that the sequences do not divide.
    """
    state_slots = table.state_slots
    expect_dims(2, state_slots, "state_slots [B, 1]")
    sequences = state_slots.shape[0]
    for name, numbers in (("state_slots", state_slots), ("starts", table.starts), ("counts", table.counts)):
        assert numbers.shape == (sequences, 1), f"{name} are [{sequences}, 1], not {numbers.shape}"
    assert tokens % sequences == 0, f"{tokens} tokens of {sequences} sequences"
    elements = 1
    for size in state.shape[1:]:
        elements = elements * size
    most = 2**23 // state.shape[1]
    assert state.shape[0] <= most, (
        f"states of {elements} elements lie in at most {most} slots, not {state.shape[0]}"
    )
    assert tokens <= 2**23, f"at most {2**23} tokens, not {tokens}"
    return sequences


def column(numbers, first, last):
    """Load run-time numbers of some sequences, one on each partition, in float32."""
    return load(numbers[first:last, :], nl.float32)


def row(numbers, height):
    """Load run-time numbers [B, 1] of all sequences to each of `height` partitions, in float32: [height, B]."""
    sequences = numbers.shape[0]
    raw = load(numbers.ap(pattern=[[0, height], [1, sequences]]), numbers.dtype)
    wide = nl.ndarray(raw.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide, src=raw)
    return wide


def state_rows(state, numbers, begin, end, panel):
    """Return a view of some rows of the states of a group, by their slots: [sequence, row, column] in HBM."""
    _, height, channels = state.shape
    left, right = panel
    pattern = [[height * channels, numbers.shape[0]], [channels, end - begin], [1, right - left]]
    return state.ap(pattern=pattern, offset=begin * channels + left, vector_offset=numbers)


def load_row(numbers):
    """Load run-time numbers [B, 1] into one row of SBUF, [1, B]."""
    return load(numbers.ap(pattern=[[0, 1], [1, numbers.shape[0]]]), nl.int32)


def below(numbers, limit, value):
    """Return `value` where a number is below the limit, else 0."""
    result = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result, data=numbers, op0=nl.less, operand0=limit, op1=nl.multiply, operand1=float(value)
    )
    return result


def total(first, second, dtype):
    """Return the sum of two tiles of numbers, in a dtype."""
    result = nl.ndarray(first.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=first, data2=second, op=nl.add)
    return result


def slots_or_none(slots, numbers, count):
    """Return the slots of sequences [rows, columns] int32, and one beyond all `count` of them where a number is 0."""
    return total(slots, below(numbers, 1.0, count), nl.int32)


def product_dtype(rows, weight):
    """Return the dtype of a product whose sums go to float32 states: that of both, or float32."""
    return rows.dtype if rows.dtype == weight.dtype else nl.float32


def sequence_groups(sequences):
    """Return ranges of up to 128 sequences."""
    return ranges(0, sequences)

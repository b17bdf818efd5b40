"""What both kernels of the gated delta rule share: their arguments, the checks of them, and the reference."""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl
import numpy as np

from nki_kernels.precision import widened
from nki_kernels.tiles import PARTITIONS, expect_dims


@dataclass
class Arguments(nl.NKIObject):
    """The arguments of `gated_delta`, whose file describes them; `gates` begin at the column of z."""

    qkv: nl.NkiTensor
    gates: nl.NkiTensor
    a_log: nl.NkiTensor
    dt_bias: nl.NkiTensor
    norm_weight: nl.NkiTensor
    states: nl.NkiTensor
    state_slots: nl.NkiTensor
    starts: nl.NkiTensor
    counts: nl.NkiTensor
    key_heads: int
    eps: float


def select_gates(gates, first, states):
    """Return a view of the columns of z, b and a of the gates, Hv dv + 2 Hv columns from `first` on.

    Args:
        states: [slots, Hv, dk, dv], for the sizes.

    Raises:
        AssertionError: gates are not 2-D, states are not 4-D, or the columns are not all within the gates.
    """
    expect_dims(2, gates, "gates [T, W]")
    expect_dims(4, states, "states [slots, Hv, dk, dv]")
    heads, width = states.shape[1], states.shape[3]
    last = first + heads * width + 2 * heads
    assert first >= 0 and last <= gates.shape[1], (
        f"gates have columns 0 to {gates.shape[1] - 1}; z, b and a take columns {first} to {last - 1}: "
        "pass wider gates or another `first`"
    )
    return gates[:, first:last]


def check_arguments(arguments):
    """Raise an AssertionError if a kernel's arguments do not fit together, or sizes exceed the limits.

    Checks shapes and dtypes. The limits: dk and dv up to 128, and up to 128 sequences. Values are not
    checked.
    """
    qkv, gates, states, key_heads = arguments.qkv, arguments.gates, arguments.states, arguments.key_heads
    expect_dims(2, qkv, "qkv [T, 2 Hk dk + Hv dv]")
    expect_dims(2, arguments.state_slots, "state_slots [B, 1]")
    tokens, columns = qkv.shape
    _, heads, depth, width = states.shape
    sequences = arguments.state_slots.shape[0]
    assert states.dtype == nl.float32, (
        f"states are {states.dtype}; pass float32 states, as they add up over tokens"
    )
    assert max(depth, width) <= PARTITIONS, (
        f"heads have {max(depth, width)} elements; dk and dv are at most {PARTITIONS}, the partitions of a tile"
    )
    assert heads % key_heads == 0, (
        f"states have {heads} value heads, no multiple of key_heads={key_heads}: "
        "each key head has equally many value heads"
    )
    needed = 2 * key_heads * depth + heads * width
    assert columns == needed, (
        f"qkv has {columns} columns; {key_heads} key heads of {depth} and {heads} value heads of {width} need {needed}"
    )
    assert gates.shape[0] == tokens, (
        f"gates have {gates.shape[0]} rows, qkv has {tokens}: pass a row for each token in both"
    )
    assert gates.dtype == qkv.dtype, f"gates are {gates.dtype}, qkv is {qkv.dtype}: pass gates in qkv's dtype"
    expect_row(arguments.a_log, heads)
    expect_row(arguments.dt_bias, heads)
    expect_row(arguments.norm_weight, width)
    for numbers in (arguments.state_slots, arguments.starts, arguments.counts):
        assert numbers.shape == (sequences, 1), (
            f"state_slots, starts and counts are [{sequences}, 1], one number of each sequence, not {numbers.shape}"
        )
    assert sequences <= PARTITIONS, (
        f"at most {PARTITIONS} sequences are taken, not {sequences}: divide them over several launches"
    )
    assert tokens % sequences == 0, (
        f"{tokens} tokens of {sequences} sequences: pad the sequences, so that all have equally many rows"
    )


def expect_row(row, columns):
    """Raise an AssertionError unless `row` has the shape [1, columns]."""
    assert row.shape == (1, columns), (
        f"a vector of {columns} elements is a row [1, {columns}], not {row.shape}"
    )


def delta_rule_reference(
    qkv: np.ndarray,
    gates: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    norm_weight: np.ndarray,
    states: np.ndarray,
    state_slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    key_heads: int,
    eps: float,
    first: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs [T, Hv dv] in qkv's dtype, and `states`, which are updated in place; token by token in NumPy.

    The arguments are those of `gated_delta`. Computes in float32, or in float64 if qkv is. An output of
    padding is read from the state after the last real token.
    """
    _, heads, depth, width = states.shape
    tokens = len(qkv) // len(counts)
    wide = widened(qkv)
    q, k, v = np.split(wide, [key_heads * depth, 2 * key_heads * depth], axis=1)
    bounds = [heads * width, heads * (width + 1), heads * (width + 2)]
    z, b, a, _ = np.split(widened(gates)[:, first:], bounds, axis=1)
    q, k = (normalise_reference(rows.reshape(len(qkv), key_heads, depth)) for rows in (q, k))
    q, k = (np.repeat(rows, heads // key_heads, axis=1) for rows in (q * depth**-0.5, k))
    v = v.reshape(len(qkv), heads, width)
    g = -np.exp(widened(a_log)) * np.logaddexp(a + widened(dt_bias), 0).astype(wide.dtype)
    beta = 1 / (1 + np.exp(-b))
    o = np.zeros_like(v)
    for sequence, slot in enumerate(state_slots[:, 0]):
        state = states[slot] * (starts[sequence, 0] != 0)
        for token in range(tokens):
            row = sequence * tokens + token
            if token < counts[sequence, 0]:
                state = state * np.exp(g[row])[:, None, None]
                predicted = (k[row][:, None, :] @ state)[:, 0]
                write = beta[row][:, None] * (v[row] - predicted)
                state = state + k[row][:, :, None] * write[:, None, :]
            o[row] = (q[row][:, None, :] @ state)[:, 0]
        states[slot] = state
    root = 1 / np.sqrt(np.mean(o * o, axis=2, keepdims=True) + wide.dtype.type(eps))
    y = (o * root * widened(norm_weight)).reshape(z.shape) * (z / (1 + np.exp(-z)))
    return y.astype(qkv.dtype), states


def normalise_reference(rows: np.ndarray) -> np.ndarray:
    """Return vectors, along the last axis, divided by their lengths; 1e-6 is added to each squared length."""
    return rows / np.sqrt(np.sum(rows * rows, axis=-1, keepdims=True) + rows.dtype.type(1e-6))

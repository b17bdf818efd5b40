"""What both kernels of the gated delta rule share: their arguments, the checks of them, and the reference."""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl
import numpy as np

from nki_kernels.precision import widened
from nki_kernels.tiles import PARTITIONS, expect_dims


@dataclass
class Arguments(nl.NKIObject):
    """The arguments of `gated_delta`, which describes them; the gates begin at the column of z."""

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
    """Return the columns of z, b and a, from column `first` on: [T, Hv dv + 2 Hv]."""
    expect_dims(2, gates, "gates [T, W]")
    expect_dims(4, states, "states [slots, Hv, dk, dv]")
    heads, width = states.shape[1], states.shape[3]
    last = first + heads * width + 2 * heads
    assert first >= 0 and last <= gates.shape[1], (
        f"gates have {gates.shape[1]} columns; z, b and a take {first} to {last}"
    )
    return gates[:, first:last]


def check_arguments(arguments):
    """Refuse shapes that do not fit together, and sizes beyond the limits."""
    qkv, gates, states, key_heads = arguments.qkv, arguments.gates, arguments.states, arguments.key_heads
    expect_dims(2, qkv, "qkv [T, 2 Hk dk + Hv dv]")
    expect_dims(2, arguments.state_slots, "state_slots [B, 1]")
    tokens, columns = qkv.shape
    _, heads, depth, width = states.shape
    sequences = arguments.state_slots.shape[0]
    assert states.dtype == nl.float32, f"states are float32, not {states.dtype}"
    assert max(depth, width) <= PARTITIONS, (
        f"heads have at most {PARTITIONS} elements, not {max(depth, width)}"
    )
    assert heads % key_heads == 0, f"{heads} value heads for {key_heads} key heads"
    needed = 2 * key_heads * depth + heads * width
    assert columns == needed, f"qkv has {needed} columns, not {columns}"
    assert gates.shape[0] == tokens, f"gates of {tokens} tokens, not {gates.shape[0]}"
    assert gates.dtype == qkv.dtype, f"gates is {gates.dtype}, qkv is {qkv.dtype}"
    expect_row(arguments.a_log, heads)
    expect_row(arguments.dt_bias, heads)
    expect_row(arguments.norm_weight, width)
    for numbers in (arguments.state_slots, arguments.starts, arguments.counts):
        assert numbers.shape == (sequences, 1), (
            f"numbers of sequences are [{sequences}, 1], not {numbers.shape}"
        )
    assert sequences <= PARTITIONS, f"at most {PARTITIONS} sequences are taken, not {sequences}"
    assert tokens % sequences == 0, f"{tokens} tokens of {sequences} sequences"


def expect_row(row, columns):
    """Refuse a row that has not the shape [1, columns]."""
    assert row.shape == (1, columns), f"a row of {columns} is [1, {columns}], not {row.shape}"


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
    """Return outputs and states, token by token; states are updated in place.

    Outputs of padding follow from the state before it.
    """
    _, heads, depth, width = states.shape
    tokens = len(qkv) // len(counts)
    wide = widened(qkv)
    q, k, v = np.split(wide, [key_heads * depth, 2 * key_heads * depth], axis=1)
    bounds = [heads * width, heads * (width + 1), heads * (width + 2)]
    z, b, a, _ = np.split(widened(gates)[:, first:], bounds, axis=1)
    q, k = (unit_reference(rows.reshape(len(qkv), key_heads, depth)) for rows in (q, k))
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


def unit_reference(rows: np.ndarray) -> np.ndarray:
    """Return vectors divided by their lengths."""
    return rows / np.sqrt(np.sum(rows * rows, axis=-1, keepdims=True) + rows.dtype.type(1e-6))

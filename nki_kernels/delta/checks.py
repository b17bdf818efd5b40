"""What the kernels of the gated delta rule refuse."""

from __future__ import annotations

import nki.language as nl

from nki_kernels.tiles import PARTITIONS, expect_dims


def gates_from(gates, first, states):
    """The columns of z, b and a, of which the first is `first`."""
    expect_dims(2, gates, "gates [T, W]")
    expect_dims(4, states, "states [slots, Hv, dk, dv]")
    heads, width = states.shape[1], states.shape[3]
    last = first + heads * width + 2 * heads
    assert first >= 0 and last <= gates.shape[1], (
        f"gates have {gates.shape[1]} columns; z, b and a take {first} to {last}"
    )
    return gates[:, first:last]


def check_arguments(qkv, gates, a_log, dt_bias, norm_weight, states, numbers, key_heads):
    """Refuse shapes that do not fit together, and sizes beyond the limits."""
    expect_dims(2, qkv, "qkv [T, 2 Hk dk + Hv dv]")
    expect_dims(2, numbers[0], "state_slots [B, 1]")
    tokens, columns = qkv.shape
    _, heads, depth, width = states.shape
    sequences = numbers[0].shape[0]
    assert states.dtype == nl.float32, f"states are float32, not {states.dtype}"
    assert max(depth, width) <= PARTITIONS, (
        f"heads have at most {PARTITIONS} elements, not {max(depth, width)}"
    )
    assert heads % key_heads == 0, f"{heads} value heads for {key_heads} key heads"
    needed = 2 * key_heads * depth + heads * width
    assert columns == needed, f"qkv has {needed} columns, not {columns}"
    assert gates.shape[0] == tokens, f"gates of {tokens} tokens, not {gates.shape[0]}"
    assert gates.dtype == qkv.dtype, f"gates is {gates.dtype}, qkv is {qkv.dtype}"
    for row, size in ((a_log, heads), (dt_bias, heads), (norm_weight, width)):
        assert row.shape == (1, size), f"a row of {size} is [1, {size}], not {row.shape}"
    for number in numbers:
        assert number.shape == (sequences, 1), (
            f"numbers of sequences are [{sequences}, 1], not {number.shape}"
        )
    assert sequences <= PARTITIONS, f"at most {PARTITIONS} sequences are taken, not {sequences}"
    assert tokens % sequences == 0, f"{tokens} tokens of {sequences} sequences"

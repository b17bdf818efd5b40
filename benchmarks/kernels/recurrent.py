"""The works of layers with states on one rank: gated delta rule, state space duality, selective scan, convolution.

Shapes are one rank's: Qwen3-Next-80B over 4, 8 and 16 ranks (4, 2, 1 key heads and 8, 4, 2 value heads of 128),
Mamba-2 2.7B on one (80 heads of 64, states of 128), Mamba 2.8B on one (5120 channels, states of 16, rank 160). The
floor counts what the recurrence itself needs, whatever the algorithm: each array once, states in and out once, and for
every element of a state and token three multiply-adds (gated delta rule) or two operations for each of decay, input and
output (scans). What chunks compute besides is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.kernels.works import BFLOAT16, Work
from model.layers.launch import Argument, Launch, LeastWork, Value

TOKENS = 2048
SEQUENCES = (1, 16, 64)
DELTA_RANKS = ((4, 4, 8), (8, 2, 4), (16, 1, 2))
"""Ranks, and the key and value heads of each."""


def recurrent_works() -> Iterator[Work]:
    """Prompts of 2048 tokens, then steps of one token of each sequence."""
    for sequences, tokens in ((1, TOKENS), *((each, 1) for each in SEQUENCES)):
        size = f"T={tokens}" if tokens > 1 else f"B={sequences}"
        phase = "prefill" if tokens > 1 else "decode"
        for ranks, key_heads, heads in DELTA_RANKS:
            name = f"{phase} gated delta, Qwen3-Next tp{ranks}, {size}"
            yield _gated_delta(name, sequences, tokens, key_heads, heads)
        yield _duality(f"{phase} ssd, Mamba-2 2.7B, {size}", sequences, tokens, 80, 64, 128)
        yield _scan(f"{phase} selective scan, Mamba 2.8B, {size}", sequences, tokens, 5120, 16, 160)
        yield _convolution(f"{phase} causal conv, Mamba 2.8B, {size}", sequences, tokens, 5120, 4)


def _value(name: str, *sizes: int, dtype: Any = BFLOAT16) -> Value:
    return Value(name, sizes, np.dtype(dtype))


def _places(sequences: int) -> tuple[Value, ...]:
    return tuple(_value(name, sequences, 1, dtype=np.int32) for name in ("slots", "starts", "counts"))


def _work(name: str, kernel: str, rows: int, operations: float, arguments: tuple[Argument, ...]) -> Work:
    """A launch that reads its arguments once and writes y, as large as the first of them says, and its states."""
    values = [each for each in arguments if isinstance(each, Value)]
    moved = sum(each.nbytes for each in values)
    moved += sum(each.nbytes for each in values if each.name == "state")
    own = tuple(each for each in arguments if not (isinstance(each, Value) and each.name == "y"))
    least = LeastWork(operations, float(moved))
    return Work(name, None, 0, least, (Launch(kernel, own, ("y", "state"), least, rows),))


def _gated_delta(name: str, sequences: int, tokens: int, key_heads: int, heads: int) -> Work:
    rows, size = sequences * tokens, 128
    state = _value("state", sequences, heads, size, size, dtype=np.float32)
    arguments: tuple[Argument, ...] = (
        _value("qkv", rows, (2 * key_heads + heads) * size),
        _value("gates", rows, heads * (size + 2)),
        *(_value("a_log", 1, heads), _value("dt_bias", 1, heads), _value("norm", 1, size)),
        state,
        *_places(sequences),
        key_heads,
        1e-6,
        _value("y", rows, heads * size),
    )
    kernel = "gated_delta" if tokens > 1 else "gated_delta_step"
    return _work(name, kernel, rows, 6.0 * rows * heads * size * size, arguments)


def _duality(name: str, sequences: int, tokens: int, heads: int, depth: int, states: int) -> Work:
    rows, inner = sequences * tokens, heads * depth
    arguments: tuple[Argument, ...] = (
        *(_value("u", rows, inner + 2 * states), _value("steps", rows, heads)),
        *(_value(each, 1, heads) for each in ("dt_bias", "a_log", "d")),
        *(_value("gate", rows, inner), _value("state", sequences, states, inner, dtype=np.float32)),
        *(*_places(sequences), _value("y", rows, inner)),
    )
    return _work(name, "ssd", rows, 6.0 * rows * inner * states, arguments)


def _scan(name: str, sequences: int, tokens: int, channels: int, states: int, rank: int) -> Work:
    rows = sequences * tokens
    arguments: tuple[Argument, ...] = (
        *(_value("u", rows, channels), _value("projected", rows, rank + 2 * states)),
        *(_value("w_dt", rank, channels), _value("dt_bias", 1, channels)),
        *(_value("a_log", channels, states), _value("d", 1, channels), _value("gate", rows, channels)),
        *(_value("state", sequences, channels, states, dtype=np.float32), *_places(sequences)),
        _value("y", rows, channels),
    )
    return _work(
        name, "selective_scan", rows, 2.0 * rows * channels * rank + 6.0 * rows * channels * states, arguments
    )


def _convolution(name: str, sequences: int, tokens: int, channels: int, taps: int) -> Work:
    rows = sequences * tokens
    arguments: tuple[Argument, ...] = (
        *(_value("x", rows, channels), _value("weight", taps, channels), _value("bias", 1, channels)),
        *(_value("state", sequences, taps - 1, channels), *_places(sequences), _value("y", rows, channels)),
    )
    return _work(name, "causal_conv1d", rows, 2.0 * rows * channels * taps, arguments)

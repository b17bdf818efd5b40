"""Works of layers with recurrent states on one rank.

They are the gated delta rule, state space duality, the selective scan and the causal convolution. Shapes are one
rank's: Qwen3-Next-80B over 4, 8 and 16 ranks (4, 2, 1 key heads and 8, 4, 2 value heads of 128), Mamba-2 2.7B on one
(80 heads of 64, states of 128), Mamba 2.8B on one (5120 channels, states of 16, rank 160).

The floor counts what the recurrence needs with any algorithm: each array is moved once, and states in and out once.
Per element of a state and token it counts three multiply-adds (gated delta rule), or two operations each for decay,
input and output (scans). Additional operations of chunked algorithms are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.kernels.works import BFLOAT16, Work
from model.layers.launch import Argument, Launch, LeastWork, Value

TOKENS = 2048
SEQUENCES = (1, 16, 64)
DELTA_RANKS = ((4, 4, 8), (8, 2, 4), (16, 1, 2))
"""Ranks, and the key and value heads of each."""


def recurrent_works() -> Iterator[Work]:
    """Yield the works of prompts of 2048 tokens, then those of decode steps of one token per sequence."""
    for sequences, tokens in ((1, TOKENS), *((count, 1) for count in SEQUENCES)):
        size = f"T={tokens}" if tokens > 1 else f"B={sequences}"
        phase = "prefill" if tokens > 1 else "decode"
        for ranks, key_heads, heads in DELTA_RANKS:
            name = f"{phase} gated delta, Qwen3-Next tp{ranks}, {size}"
            yield _gated_delta(name, sequences, tokens, key_heads, heads)
        yield _duality(f"{phase} ssd, Mamba-2 2.7B, {size}", sequences, tokens, 80, 64, 128)
        yield _scan(f"{phase} selective scan, Mamba 2.8B, {size}", sequences, tokens, 5120, 16, 160)
        yield _convolution(f"{phase} causal conv, Mamba 2.8B, {size}", sequences, tokens, 5120, 4)


def _value(name: str, *sizes: int, dtype: Any = BFLOAT16) -> Value:
    """Return a tensor argument of a name and shape, bfloat16 unless `dtype` is given."""
    return Value(name, sizes, np.dtype(dtype))


def _sequence_arguments(sequences: int) -> dict[str, Value]:
    """Return the int32 arguments [sequences, 1] that describe sequences: state slots, starts and token counts."""
    names = {"state_slots": "slots", "starts": "starts", "counts": "counts"}
    return {parameter: _value(name, sequences, 1, dtype=np.int32) for parameter, name in names.items()}


def _work(
    name: str, kernel: str, operations: float, arguments: Mapping[str, Argument], result: Value
) -> Work:
    """Return the work of a launch that reads its arguments once, and writes its `result` and its states once."""
    values = [argument for argument in arguments.values() if isinstance(argument, Value)]
    moved = result.nbytes + sum(value.nbytes for value in values)
    moved += sum(value.nbytes for value in values if value.name == "state")
    least = LeastWork(operations, float(moved))
    launch = Launch(kernel, arguments, (result.name, "state"), least, result.shape[0])
    return Work(name, None, 0, least, (launch,))


def _gated_delta(name: str, sequences: int, tokens: int, key_heads: int, heads: int) -> Work:
    """Return the work of the gated delta rule, by the kernel for prompts or for steps of one token."""
    rows, size = sequences * tokens, 128
    state = _value("state", sequences, heads, size, size, dtype=np.float32)
    arguments: dict[str, Argument] = {
        "qkv": _value("qkv", rows, (2 * key_heads + heads) * size),
        "gates": _value("gates", rows, heads * (size + 2)),
        "a_log": _value("a_log", 1, heads),
        "dt_bias": _value("dt_bias", 1, heads),
        "norm_weight": _value("norm", 1, size),
        "states": state,
        **_sequence_arguments(sequences),
        "key_heads": key_heads,
        "eps": 1e-6,
    }
    kernel = "gated_delta" if tokens > 1 else "gated_delta_step"
    y = _value("y", rows, heads * size)
    return _work(name, kernel, 6.0 * rows * heads * size * size, arguments, y)


def _duality(name: str, sequences: int, tokens: int, heads: int, depth: int, states: int) -> Work:
    """Return the work of state space duality; `depth` is the size of a head."""
    rows, inner = sequences * tokens, heads * depth
    arguments: dict[str, Argument] = {
        "u": _value("u", rows, inner + 2 * states),
        "steps": _value("steps", rows, heads),
        **{parameter: _value(parameter, 1, heads) for parameter in ("dt_bias", "a_log", "d")},
        "gate": _value("gate", rows, inner),
        "state": _value("state", sequences, states, inner, dtype=np.float32),
        **_sequence_arguments(sequences),
    }
    return _work(name, "ssd", 6.0 * rows * inner * states, arguments, _value("y", rows, inner))


def _scan(name: str, sequences: int, tokens: int, channels: int, states: int, rank: int) -> Work:
    """Return the work of the selective scan with its projection of step sizes.

    `rank` is the rank of that projection.
    """
    rows = sequences * tokens
    arguments: dict[str, Argument] = {
        "u": _value("u", rows, channels),
        "projected": _value("projected", rows, rank + 2 * states),
        "w_dt": _value("w_dt", rank, channels),
        "dt_bias": _value("dt_bias", 1, channels),
        "a_log": _value("a_log", channels, states),
        "d": _value("d", 1, channels),
        "gate": _value("gate", rows, channels),
        "state": _value("state", sequences, channels, states, dtype=np.float32),
        **_sequence_arguments(sequences),
    }
    operations = 2.0 * rows * channels * rank + 6.0 * rows * channels * states
    return _work(name, "selective_scan", operations, arguments, _value("y", rows, channels))


def _convolution(name: str, sequences: int, tokens: int, channels: int, taps: int) -> Work:
    """Return the work of the causal convolution along the tokens, with `taps` weights per channel."""
    rows = sequences * tokens
    arguments: dict[str, Argument] = {
        "x": _value("x", rows, channels),
        "weight": _value("weight", taps, channels),
        "bias": _value("bias", 1, channels),
        "state": _value("state", sequences, taps - 1, channels),
        **_sequence_arguments(sequences),
    }
    return _work(name, "causal_conv1d", 2.0 * rows * channels * taps, arguments, _value("y", rows, channels))

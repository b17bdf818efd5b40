"""Arguments of kernels with states, and their run-time data: slots, starts and counts of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.kernels.accuracy import normal, run


def column(numbers: Sequence[int]) -> np.ndarray:
    """Numbers as the kernels take them: [B, 1] int32."""
    return np.array(numbers, np.int32).reshape(-1, 1)


def places(
    sequences: int, tokens: int, slots: int, fresh: bool | None = None, padded: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots, starts and counts of sequences of up to `tokens` tokens; some fresh and some padded, or all alike."""
    random = np.random.default_rng(sequences)
    starts = random.integers(0, 2, sequences) * random.integers(1, 999, sequences)
    if fresh is not None:
        starts = np.full(sequences, 0 if fresh else 7)
    counts = random.integers(0, tokens + 1, sequences) if padded else np.full(sequences, tokens)
    return column(random.permutation(slots)[:sequences]), column(starts), column(counts)


def convolution(
    sequences: int,
    tokens: int,
    channels: int,
    taps: int = 4,
    dtype: type = np.float32,
    weights: Any = None,
    bias: bool = True,
    first: int = 0,
    activation: str | None = "silu",
    **which: Any,
) -> list[Any]:
    """Of sequences of so many tokens each; `first` columns of x before and behind the channels are none."""
    held, slots = weights or dtype, sequences + 2
    return [
        normal(1, sequences * tokens, channels + 2 * first, dtype=dtype),
        normal(2, taps, channels, dtype=held),
        normal(3, 1, channels, dtype=held) if bias else None,
        normal(4, slots, taps - 1, channels, dtype=dtype),
        *places(sequences, tokens, slots, **which),
        first,
        activation,
    ]


def selective(
    sequences: int,
    tokens: int,
    channels: int,
    states: int = 4,
    rank: int = 3,
    dtype: type = np.float32,
    weights: Any = None,
    first: int = 0,
    **which: Any,
) -> list[Any]:
    """Of sequences of so many tokens each; rates and time steps are of the size of those of trained models."""
    held, slots, rows = weights or dtype, sequences + 2, sequences * tokens
    return [
        normal(1, rows, channels, dtype=dtype),
        normal(2, rows, rank + 2 * states, dtype=dtype),
        normal(3, rank, channels, dtype=held, scale=rank**-0.5),
        (normal(4, 1, channels) - 2).astype(held),
        normal(5, channels, states, dtype=held),
        normal(6, 1, channels, dtype=held),
        normal(7, rows, channels + 2 * first, dtype=dtype),
        normal(8, slots, channels, states),
        *places(sequences, tokens, slots, **which),
        first,
    ]


def duality(
    sequences: int,
    tokens: int,
    heads: int,
    depth: int = 8,
    states: int = 6,
    groups: int = 1,
    dtype: type = np.float32,
    weights: Any = None,
    first: int = 0,
    limits: tuple[float, float | None] = (0.0, None),
    **which: Any,
) -> list[Any]:
    """Of `ssd`: sequences of so many tokens each; rates and time steps are of the size of those of trained models."""
    held, slots, rows, inner = weights or dtype, sequences + 2, sequences * tokens, heads * depth
    return [
        normal(1, rows, inner + 2 * groups * states, dtype=dtype),
        normal(2, rows, heads + 2 * first, dtype=dtype),
        (normal(3, 1, heads) - 2).astype(held),
        normal(4, 1, heads, dtype=held),
        normal(5, 1, heads, dtype=held),
        normal(6, rows, inner + 2 * first, dtype=dtype),
        normal(7, slots, states, inner),
        *places(sequences, tokens, slots, **which),
        groups,
        first,
        first,
        *limits,
    ]


def check_nan_stays(kernel: Any, given: Sequence[Any], place: int, states: int, target: str) -> None:
    """One token of each sequence: a NaN of the third one, in argument `place`, reaches its own row and state alone.

    `states` is the place of the states, behind which their slots are.
    """
    sequence, slots = 2, given[states + 1][:, 0]
    poisoned = [*given]
    poisoned[place] = given[place].copy()
    poisoned[place][slots[sequence] if place == states else sequence] = np.nan
    expected, found = (run(kernel, each, target) for each in (given, poisoned))
    assert np.isnan(found[0][sequence]).all()
    for before, after, own in zip(expected, found, (sequence, slots[sequence])):
        assert np.array_equal(np.delete(before, own, axis=0), np.delete(after, own, axis=0))

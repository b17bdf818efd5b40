"""Arguments of kernels with states, and their run-time data: slots, starts and counts of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.kernels.accuracy import normal
from tests.kernels.case import BF16, Arguments, KernelCase, Settings, Undefined


def column(numbers: Sequence[int]) -> np.ndarray:
    """Return numbers as the kernels take them: [B, 1] int32."""
    return np.array(numbers, np.int32).reshape(-1, 1)


def draw_slots(
    sequences: int, tokens: int, slots: int, fresh: bool | None = None, padded: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw slots, starts and counts of sequences of up to `tokens` tokens; some fresh and some padded, or all alike."""
    random = np.random.default_rng(sequences)
    starts = random.integers(0, 2, sequences) * random.integers(1, 999, sequences)
    if fresh is not None:
        starts = np.full(sequences, 0 if fresh else 7)
    counts = random.integers(0, tokens + 1, sequences) if padded else np.full(sequences, tokens)
    return column(random.permutation(slots)[:sequences]), column(starts), column(counts)


def convolution(
    sequences: int = 2,
    tokens: int = 3,
    channels: int = 24,
    taps: int = 4,
    dtype: type = np.float32,
    weights: Any = None,
    bias: bool = True,
    first: int = 0,
    activation: str | None = "silu",
    **slot_options: Any,
) -> list[Any]:
    """Draw arguments for sequences of `tokens` tokens; `first` columns of x before and after the channels are spare."""
    weight_dtype, slots = weights or dtype, sequences + 2
    return [
        normal(1, sequences * tokens, channels + 2 * first, dtype=dtype),
        normal(2, taps, channels, dtype=weight_dtype),
        normal(3, 1, channels, dtype=weight_dtype) if bias else None,
        normal(4, slots, taps - 1, channels, dtype=dtype),
        *draw_slots(sequences, tokens, slots, **slot_options),
        first,
        activation,
    ]


def selective(
    sequences: int = 2,
    tokens: int = 3,
    channels: int = 24,
    states: int = 4,
    rank: int = 3,
    dtype: type = np.float32,
    weights: Any = None,
    first: int = 0,
    **slot_options: Any,
) -> list[Any]:
    """Draw arguments for sequences of `tokens` tokens each; rates and time steps are of the size in trained models."""
    weight_dtype, slots, rows = weights or dtype, sequences + 2, sequences * tokens
    return [
        normal(1, rows, channels, dtype=dtype),
        normal(2, rows, rank + 2 * states, dtype=dtype),
        normal(3, rank, channels, dtype=weight_dtype, scale=rank**-0.5),
        (normal(4, 1, channels) - 2).astype(weight_dtype),
        normal(5, channels, states, dtype=weight_dtype),
        normal(6, 1, channels, dtype=weight_dtype),
        normal(7, rows, channels + 2 * first, dtype=dtype),
        normal(8, slots, channels, states),
        *draw_slots(sequences, tokens, slots, **slot_options),
        first,
    ]


def duality(
    sequences: int = 2,
    tokens: int = 3,
    heads: int = 6,
    depth: int = 8,
    states: int = 6,
    groups: int = 1,
    dtype: type = np.float32,
    weights: Any = None,
    first: int = 0,
    limits: tuple[float, float | None] = (0.0, None),
    **slot_options: Any,
) -> list[Any]:
    """Draw arguments of `ssd` for sequences of `tokens` tokens each; rates and time steps are as in trained models."""
    weight_dtype, slots, rows, inner = weights or dtype, sequences + 2, sequences * tokens, heads * depth
    return [
        normal(1, rows, inner + 2 * groups * states, dtype=dtype),
        normal(2, rows, heads + 2 * first, dtype=dtype),
        (normal(3, 1, heads) - 2).astype(weight_dtype),
        normal(4, 1, heads, dtype=weight_dtype),
        normal(5, 1, heads, dtype=weight_dtype),
        normal(6, rows, inner + 2 * first, dtype=dtype),
        normal(7, slots, states, inner),
        *draw_slots(sequences, tokens, slots, **slot_options),
        groups,
        first,
        first,
        *limits,
    ]


def beside_channels(*names: str) -> list[Undefined]:
    """Return cases whose five columns before and five after the channels are undefined: they are not read."""
    index = np.s_[:, [*range(5), *range(-5, 0)]]
    return [Undefined(dict.fromkeys(names, index), dict(tokens=tokens, first=5)) for tokens in (1, 7)]


def fresh_states(**settings: Any) -> list[Undefined]:
    """Return cases of undefined states of sequences that start: such a state counts as zeros."""
    settings |= dict(sequences=3, fresh=True)

    def kept(arguments: Arguments, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [outputs[0], outputs[1][arguments["state_slots"][:, 0]]]

    return [Undefined(dict(state=np.s_[:]), dict(settings, tokens=tokens), kept=kept) for tokens in (1, 7)]


def padding(*names: str) -> Undefined:
    """Return cases of four sequences of up to nine tokens, whose padding changes no state."""
    counts = [0, 1, 3, 9]
    rows = [9 * sequence + token for sequence in range(4) for token in range(counts[sequence], 9)]
    settings = dict(sequences=4, tokens=9, counts=column(counts))
    return Undefined(dict.fromkeys(names, rows), settings, 10.0, kept=lambda _, outputs: outputs[1:])


def nan_of_a_step(sequences: int, *names: str, **settings: Any) -> list[Undefined]:
    """Return cases of one token a sequence: a NaN of the third one reaches its own row and state alone."""
    settings |= dict(sequences=sequences, tokens=1, fresh=False, padded=False)
    indices = dict.fromkeys(names, 2) | {"state": lambda arguments: arguments["state_slots"][2, 0]}
    return [
        Undefined({name: index}, settings, rows=lambda arguments: [[2], [arguments["state_slots"][2, 0]]])
        for name, index in indices.items()
    ]


def check_pieces(
    case: KernelCase,
    names: Sequence[str],
    sizes: Sequence[int],
    settings: Settings,
    precisions: tuple[int, int],
) -> None:
    """Check that a sequence in pieces is the sequence at once, up to bits by dtype; `names` are cut into pieces."""
    arguments = case.arguments(
        dict(settings, sequences=1, tokens=sum(sizes), padded=False, starts=column([0]))
    )
    expected, state, piece_rows, first = case.run(arguments), arguments["state"], [], 0
    for size in sizes:
        piece = arguments | {name: arguments[name][first : first + size] for name in names}
        piece |= dict(state=state, starts=column([first]), counts=column([size]))
        rows, state = case.run(piece)
        piece_rows.append(rows)
        first += size
    for one, other in zip(expected, (np.concatenate(piece_rows), state)):
        wide = one.astype(np.float64)
        tolerance = 2.0 ** -precisions[one.dtype != BF16]
        assert np.abs(wide - other.astype(np.float64)).max() <= tolerance * np.abs(wide).max()

"""gated_delta and gated_delta_step: the gated delta rule in chunks and token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import nki_kernels as kernels
from tests.kernels.accuracy import in_float64, last_place, normal, run
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Undefined,
    limit,
    refuse,
    slow,
    vary,
)

SLOTS = 2
"""States beside those of the sequences."""

Heads = tuple[int, int, int, int]
SMALL: Heads = (1, 2, 16, 8)
"""Key heads, value heads, and the elements of both."""


def arguments(
    sequences: int = 1,
    tokens: int = 1,
    heads: Heads = SMALL,
    dtype: Any = F32,
    starts: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
    slots: int | None = None,
) -> list[Any]:
    """Draw random tokens and states; every second sequence begins unless `starts` are given."""
    key_heads, value_heads, depth, width = heads
    rows, slots = sequences * tokens, slots or sequences + SLOTS
    starts = [7 * (sequence % 2) for sequence in range(sequences)] if starts is None else starts
    counts = [tokens] * sequences if counts is None else counts
    return [
        normal(1, rows, 2 * key_heads * depth + value_heads * width, dtype=dtype),
        normal(2, rows, value_heads * width + 2 * value_heads, dtype=dtype),
        normal(3, 1, value_heads, dtype=dtype, scale=0.5),
        normal(4, 1, value_heads, dtype=dtype),
        1 + normal(5, 1, width, dtype=dtype, scale=0.1),
        normal(6, slots, value_heads, depth, width, scale=0.3),
        np.random.default_rng(7).permutation(slots)[:sequences, None].astype(np.int32),
        np.array(starts, np.int32)[:, None],
        np.array(counts, np.int32)[:, None],
        key_heads,
        1e-6,
    ]


def expected(inputs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return o before its norm, and states, by the recurrence in float64, head by head and token by token."""
    qkv, gates, a_log, dt_bias, _, states, slots, starts, counts, key_heads, _ = (
        in_float64(array) for array in inputs
    )
    states = states.copy()
    _, heads, depth, width = states.shape
    tokens = len(qkv) // len(counts)
    o = np.zeros((len(qkv), heads, width))
    for sequence, head in np.ndindex(len(counts), heads):
        state = states[slots[sequence, 0], head]
        if starts[sequence, 0] == 0:
            state[:] = 0
        key_head = head // (heads // key_heads)
        for row in range(sequence * tokens, sequence * tokens + int(counts[sequence, 0])):
            q, k = (
                qkv[row, first * depth : (first + 1) * depth] for first in (key_head, key_heads + key_head)
            )
            q, k = (vector / np.sqrt(vector @ vector + 1e-6) for vector in (q, k))
            first = 2 * key_heads * depth + head * width
            b, a = (gates[row, heads * width + offset * heads + head] for offset in (0, 1))
            state *= np.exp(-np.exp(a_log[0, head]) * np.log1p(np.exp(a + dt_bias[0, head])))
            write = (qkv[row, first : first + width] - state.T @ k) / (1 + np.exp(-b))
            state += np.outer(k, write)
            o[row, head] = state.T @ q / np.sqrt(depth)
    return o, states


def gated(inputs: Sequence[Any], o: np.ndarray) -> np.ndarray:
    """Return o normalised and gated, in float64."""
    rows, heads, width = o.shape
    z = in_float64(inputs[1])[:, : heads * width]
    normalised = o / np.sqrt(np.mean(o * o, axis=2, keepdims=True) + inputs[-1]) * in_float64(inputs[4])
    return normalised.reshape(rows, -1) * z / (1 + np.exp(-z))


def bound(inputs: Sequence[Any], o: np.ndarray, states: np.ndarray, roundings: float) -> tuple[Any, Any]:
    """Return how far y and states may be off.

    A value of o or of a state is a sum of products of tokens that write, and every operand is rounded `roundings` times
    to the dtype of products. Their errors add up like independent ones over the tokens that are not yet forgotten; six
    of their deviations are allowed. What o is off by, the norm divides by its root mean square.
    """
    unit = last_place(inputs[0].dtype, 1.0) / 2
    written = 6 * roundings * unit
    scale = np.sqrt(np.mean(o * o, axis=2, keepdims=True) + inputs[-1])
    largest = np.abs(o).max(axis=2, keepdims=True)
    factors = np.abs(gated(inputs, np.ones_like(o)))
    relative = (written * np.maximum(largest, np.abs(states).max() / np.sqrt(states.shape[2])) / scale) + unit
    relative = np.broadcast_to(relative, o.shape).reshape(factors.shape)
    return relative * factors * 4 + last_place(inputs[0].dtype, 1e-3), written * np.abs(states).max()


def as_recurrence(equal_tokens: int = 1) -> Callable[..., None]:
    """Return the tolerance of outputs against the recurrence, at the tokens that are real.

    Operands of the six products of a chunk are rounded, and those of the six levels of the inverse. Tokens that are
    equal have equal errors, which add up: that of n tokens is sqrt(n) times that of independent ones.
    """

    def compare(outputs: Sequence[np.ndarray], _: Callable[..., Any], inputs: Sequence[Any]) -> None:
        z_first, inputs = inputs[11], list(inputs[:11])
        width = inputs[5].shape[1] * (inputs[5].shape[3] + 2)
        inputs[1] = inputs[1][:, z_first : z_first + width]
        o, states = expected(inputs)
        real = np.concatenate(
            [np.arange(len(o) // len(inputs[8])) < count for count in inputs[8][:, 0]], dtype=bool
        )
        most_y, most_states = bound(inputs, o, states, (12 * equal_tokens) ** 0.5)
        y, kept = outputs
        assert (np.abs(y.astype(np.float64) - gated(inputs, o))[real] <= most_y[real]).all()
        assert np.abs(kept - states).max() <= most_states
        unused = np.setdiff1d(np.arange(len(states)), inputs[6][inputs[8][:, 0] > 0, 0])
        assert np.array_equal(kept[unused], inputs[5][unused])

    return compare


def wider(gates: np.ndarray) -> np.ndarray:
    """Return gates that stand in wider rows, from column 48 on."""
    return np.pad(gates, ((0, 0), (48, 5)), constant_values=np.nan)


def before_the_start(tokens: int) -> Undefined:
    """Return the case of an undefined state before a sequence starts, which is not read."""
    slot = dict(states=lambda inputs: inputs["state_slots"][0, 0])
    return Undefined(slot, dict(sequences=2, tokens=tokens, starts=[0, 4]))


UNEVEN: Heads = (1, 6, 127, 33)
ANY_HEADS = [(1, 1, 128, 128), (3, 3, 8, 8), (2, 6, 8, 16), UNEVEN, (2, 10, 8, 8)]
ROWS = ("state_slots", "starts", "counts")
REFUSALS = [
    refuse("states are bfloat16; pass float32 states", states=lambda states: states.astype(BF16)),
    refuse(
        "heads have 129 elements; dk and dv are at most 128", dict(heads=(1, 1, 128, 8)), heads=(1, 1, 129, 8)
    ),
    refuse("2 value heads, no multiple of key_heads=3", key_heads=3),
    refuse(
        "qkv has 47 columns; 1 key heads of 16 and 2 value heads of 8 need 48", qkv=lambda qkv: qkv[:, 1:]
    ),
    refuse("gates have columns 0 to 18; z, b and a take columns 0 to 19", gates=lambda gates: gates[:, 1:]),
    refuse("gates have columns 0 to 19; z, b and a take columns 1 to 20", first=1),
    refuse("gates have 2 rows, qkv has 1", gates=lambda gates: gates.repeat(2, axis=0)),
    refuse("gates are bfloat16, qkv is float32", gates=lambda gates: gates.astype(BF16)),
    refuse("a vector of 2 elements is a row [1, 2]", a_log=lambda a_log: a_log[:, 1:]),
    refuse("state_slots, starts and counts are [1, 1]", counts=np.zeros((2, 1), np.int32)),
]


class TestGatedDelta(KernelTests):
    """Heads of a chunk as many as partitions, and more; heads of the published size in waves, inverted one by one.

    Logarithms of decays may add up to -10^4 while those between neighbouring tokens stay exact.
    """

    case = KernelCase(
        kernels.gated_delta,
        arguments,
        values=[
            *vary(sequences=2, tokens=140, dtype=[*DTYPES]),
            *vary(sequences=2, tokens=[1, 63, 64, 65, 127, 128, 129, 300]),
            *slow(*vary(sequences=2, tokens=20, heads=ANY_HEADS)),
            *slow(*vary(tokens=20, heads=[(1, 128, 8, 8), (1, 129, 8, 8)], dtype=BF16)),
            *slow(*vary(tokens=700, heads=(2, 4, 128, 128), dtype=[*DTYPES])),
            dict(sequences=3, tokens=140, starts=(3, 0, 5), counts=(0, 140, 70)),
            dict(
                tokens=130,
                starts=(5,),
                a_log=lambda a_log: np.full_like(a_log, 4.0),
                gates=lambda gates: np.where(
                    (np.arange(130)[:, None] % 3 == 0) & (np.arange(20) > 17), F32(-20), gates
                ),
            ),
            dict(tokens=130, gates=wider, first=48),
        ],
        refusals=[
            *REFUSALS,
            refuse(
                "3 tokens of 2 sequences", dict(sequences=3), **dict.fromkeys(ROWS, lambda rows: rows[:2])
            ),
        ],
        limits=[limit("sequences", 128, "at most 128 sequences are taken, not 129", dry=True)],
        undefined=[before_the_start(1)],
        tolerance=as_recurrence(),
    )


class TestEqualKeysThatAreWrittenInFull(KernelTests):
    """Powers of the triangle would reach 10^37: the inverse is taken without them."""

    case = KernelCase(
        kernels.gated_delta,
        arguments,
        values=vary(
            tokens=128,
            heads=(1, 1, 16, 16),
            dtype=[*DTYPES],
            starts=(0,),
            qkv=lambda qkv: qkv[:1].repeat(128, axis=0),
            gates=lambda gates: np.where(np.arange(18) == 16, F32(3), gates).astype(gates.dtype),
            a_log=lambda a_log: np.full_like(a_log, -9.0),
        ),
        tolerance=as_recurrence(equal_tokens=128),
    )


class TestGatedDeltaStep(KernelTests):
    """Three times the 32 pieces of all slots are below 2^24."""

    case = KernelCase(
        kernels.gated_delta_step,
        arguments,
        every_chip=vary(sequences=3, dtype=[*DTYPES]),
        values=[
            *slow(*vary(sequences=2, heads=[heads for heads in ANY_HEADS if heads != UNEVEN])),
            *slow(*vary(sequences=[1, 5, 127, 128])),
            dict(sequences=3, starts=(3, 0, 5), counts=(0, 1, 0)),
            dict(gates=wider, first=48),
        ],
        refusals=[
            *REFUSALS,
            refuse("4 tokens, but 2 sequences of one token", dict(sequences=2), tokens=2),
        ],
        limits=[
            limit("sequences", 128, "at most 128 sequences are taken, not 129", dry=True),
            limit("slots", 174762, "2 heads lie in at most 174762 slots, not 174763", dry=True),
        ],
        undefined=[
            *(
                Undefined(
                    dict(qkv=row, gates=row, states=lambda inputs, row=row: inputs["state_slots"][row, 0]),
                    dict(sequences=9, heads=heads),
                    value,
                    rows=lambda inputs, row=row: [[row], [inputs["state_slots"][row, 0]]],
                )
                for heads in (SMALL, (3, 3, 8, 8))
                for row in (0, 3, 8)
                for value in (np.nan, np.inf)
            ),
            before_the_start(1),
        ],
        tolerance=as_recurrence(),
    )


class TestManyUnitsOfGatedDeltaStep(KernelTests):
    """128 heads of four sequences, then of a fifth; 130 of three and of two; 37 rows on one lane: seven units.

    Six of the units are taken together. Such programs are long, and no other than those of few units, so that
    they are not replayed.
    """

    case = KernelCase(
        kernels.gated_delta_step,
        arguments,
        every_chip=[dict(sequences=2, heads=UNEVEN)],
        values=[
            *slow(*vary(sequences=5, heads=[(64, 128, 8, 8), (130, 130, 1, 2)])),
            *slow(dict(sequences=25, heads=(1, 2, 37, 128))),
        ],
        tolerance=as_recurrence(),
        replays=False,
    )


def test_a_prompt_of_padding_alone_gives_zeros() -> None:
    inputs = arguments(1, 5, (1, 2, 16, 16), BF16, starts=[0], counts=[0])
    y, _ = run(kernels.gated_delta, inputs, "trn2")
    assert (y == 0).all()


def test_a_prompt_in_pieces_is_the_prompt_at_once() -> None:
    """129 tokens, then 60, then one by one: each piece goes on with the state of the one before."""
    prompt = arguments(1, 192, starts=[0])
    y, states = expected(prompt)[0], prompt[5].copy()
    pieces = []
    for first, end in ((0, 129), (129, 189), (189, 190), (190, 191), (191, 192)):
        inputs = [prompt[0][first:end], prompt[1][first:end], *prompt[2:5], states, prompt[6]]
        inputs += [np.array([[first]], np.int32), np.array([[end - first]], np.int32), *prompt[9:]]
        kernel = kernels.gated_delta_step if end - first == 1 else kernels.gated_delta
        piece, states = run(kernel, inputs, "trn2")
        pieces.append(piece)
    most_y, most_states = bound(prompt, y, expected(prompt)[1], 12**0.5)
    assert (np.abs(np.concatenate(pieces) - gated(prompt, y)) <= most_y).all()
    assert np.abs(states - expected(prompt)[1]).max() <= most_states

"""gated_delta and gated_delta_step: the gated delta rule in chunks and token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, in_every_way, in_float64, last_place, normal, run

BF16 = ml_dtypes.bfloat16
SLOTS = 2
"""States beside those of the sequences."""

Heads = tuple[int, int, int, int]
SMALL: Heads = (1, 2, 16, 8)
"""Key heads, value heads, and the elements of both."""


def arguments(
    sequences: int,
    tokens: int,
    heads: Heads = SMALL,
    dtype: Any = np.float32,
    starts: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
) -> list[Any]:
    """Random tokens and states; every second sequence begins unless `starts` are given."""
    key_heads, value_heads, depth, width = heads
    rows, slots = sequences * tokens, sequences + SLOTS
    starts = [7 * (each % 2) for each in range(sequences)] if starts is None else starts
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


def expected(given: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """o before its norm, and states, by the recurrence in float64, head by head and token by token."""
    qkv, gates, a_log, dt_bias, _, states, slots, starts, counts, key_heads, _ = (
        in_float64(each) for each in given
    )
    states = states.copy()
    _, heads, depth, width = states.shape
    tokens = len(qkv) // len(counts)
    o = np.zeros((len(qkv), heads, width))
    for sequence, head in np.ndindex(len(counts), heads):
        state = states[slots[sequence, 0], head]
        if starts[sequence, 0] == 0:
            state[:] = 0
        own = head // (heads // key_heads)
        for row in range(sequence * tokens, sequence * tokens + int(counts[sequence, 0])):
            q, k = (qkv[row, first * depth : (first + 1) * depth] for first in (own, key_heads + own))
            q, k = (each / np.sqrt(each @ each + 1e-6) for each in (q, k))
            first = 2 * key_heads * depth + head * width
            b, a = (gates[row, heads * width + place * heads + head] for place in (0, 1))
            state *= np.exp(-np.exp(a_log[0, head]) * np.log1p(np.exp(a + dt_bias[0, head])))
            write = (qkv[row, first : first + width] - state.T @ k) / (1 + np.exp(-b))
            state += np.outer(k, write)
            o[row, head] = state.T @ q / np.sqrt(depth)
    return o, states


def gated(given: Sequence[Any], o: np.ndarray) -> np.ndarray:
    """o normalised and gated, in float64."""
    rows, heads, width = o.shape
    z = in_float64(given[1])[:, : heads * width]
    normalised = o / np.sqrt(np.mean(o * o, axis=2, keepdims=True) + given[-1]) * in_float64(given[4])
    return normalised.reshape(rows, -1) * z / (1 + np.exp(-z))


def bound(given: Sequence[Any], o: np.ndarray, states: np.ndarray, roundings: float) -> tuple[Any, Any]:
    """How far y and states may be off.

    A value of o or of a state is a sum of products of tokens that write, and every operand is rounded `roundings` times
    to the dtype of products. Their errors add up like independent ones over the tokens that are not yet forgotten; six
    of their deviations are allowed. What o is off by, the norm divides by its root mean square.
    """
    unit = last_place(given[0].dtype, 1.0) / 2
    written = 6 * roundings * unit
    scale = np.sqrt(np.mean(o * o, axis=2, keepdims=True) + given[-1])
    largest = np.abs(o).max(axis=2, keepdims=True)
    factors = np.abs(gated(given, np.ones_like(o)))
    relative = (written * np.maximum(largest, np.abs(states).max() / np.sqrt(states.shape[2])) / scale) + unit
    relative = np.broadcast_to(relative, o.shape).reshape(factors.shape)
    return relative * factors * 4 + last_place(given[0].dtype, 1e-3), written * np.abs(states).max()


def checked(
    kernel: str, given: list[Any], target: str = "trn2", equal_tokens: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Run in every way and compare with the recurrence, at the tokens that are real.

    Tokens that are equal have equal errors, which add up: that of n tokens is sqrt(n) times that of independent ones.
    """
    o, states = expected(given)
    real = np.concatenate(
        [np.arange(len(o) // len(given[8])) < count for count in given[8][:, 0]], dtype=bool
    )
    for y, kept in in_every_way(getattr(kernels, kernel), given, target):
        # Operands of the six products of a chunk, and of the six levels of the inverse.
        most_y, most_states = bound(given, o, states, (12 * equal_tokens) ** 0.5)
        far = np.abs(y.astype(np.float64) - gated(given, o))[real]
        assert (far <= most_y[real]).all(), f"{far.max():.3g}, at most {most_y[real].min():.3g}"
        off = np.abs(kept - states).max()
        assert off <= most_states, f"states off by {off:.3g}, at most {most_states:.3g}"
    return y, kept


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_dtypes_on_every_chip(target: str, dtype: Any) -> None:
    checked("gated_delta", arguments(2, 140, dtype=dtype), target)
    checked("gated_delta_step", arguments(3, 1, dtype=dtype), target)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 300])
def test_any_number_of_tokens(tokens: int) -> None:
    checked("gated_delta", arguments(2, tokens))


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads", [(1, 1, 128, 128), (3, 3, 8, 8), (2, 6, 8, 16), (1, 6, 127, 33), (2, 10, 8, 8)]
)
def test_any_heads(heads: Heads) -> None:
    checked("gated_delta", arguments(2, 20, heads))
    checked("gated_delta_step", arguments(2, 1, heads))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [128, 129])
def test_heads_of_a_chunk_as_many_as_partitions_and_more(heads: int) -> None:
    checked("gated_delta", arguments(1, 20, (1, heads, 8, 8), BF16))


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 5, 127, 128])
def test_any_number_of_sequences_of_a_step(sequences: int) -> None:
    checked("gated_delta_step", arguments(sequences, 1))


@pytest.mark.parametrize("heads", [(64, 128, 8, 8), (130, 130, 1, 2)])
def test_steps_of_more_pairs_than_are_taken_together(heads: Heads) -> None:
    """128 heads of four sequences, then of a fifth; 130 of three and of two."""
    checked("gated_delta_step", arguments(5, 1, heads))


def test_a_prompt_of_padding_alone_gives_zeros() -> None:
    given = arguments(1, 5, (1, 2, 16, 16), BF16, starts=[0], counts=[0])
    y, _ = run(kernels.gated_delta, given, "trn2")
    assert (y == 0).all()


def test_steps_of_more_states_than_are_loaded_together() -> None:
    """37 rows lie on one lane: seven units, six of them together."""
    checked("gated_delta_step", arguments(25, 1, (1, 2, 37, 128)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("heads", [SMALL, (3, 3, 8, 8)])
@pytest.mark.parametrize("poisoned", [0, 3, 8])
def test_an_undefined_sequence_of_a_step_reaches_no_other(target: str, heads: Heads, poisoned: int) -> None:
    """Its state, one element of it infinite, its token and its gates: the others have the same bits."""
    given = arguments(9, 1, heads)
    wanted = run(kernels.gated_delta_step, given, target)
    slot = given[6][poisoned, 0]
    given[5][slot] = np.nan
    given[5][slot, :, 0] = np.inf
    given[0][poisoned] = given[1][poisoned] = np.nan
    got = run(kernels.gated_delta_step, given, target)
    for ours, theirs, own in zip(got, wanted, (poisoned, slot)):
        assert np.array_equal(np.delete(ours, own, axis=0), np.delete(theirs, own, axis=0))
        assert not np.isfinite(ours[own]).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_heads_of_the_published_size_in_waves(dtype: Any) -> None:
    """More chunks than are inverted at once."""
    checked("gated_delta", arguments(1, 700, (2, 4, 128, 128), dtype))


@pytest.mark.parametrize("kernel", ["gated_delta", "gated_delta_step"])
def test_padding_changes_no_state(kernel: str) -> None:
    tokens = 1 if kernel == "gated_delta_step" else 140
    counts = [0, tokens, 0] if tokens == 1 else [0, tokens, 70]
    given = arguments(3, tokens, starts=[3, 0, 5], counts=counts)
    _, states = checked(kernel, given)
    slots, slot = given[6][:, 0], given[6][0, 0]
    assert np.array_equal(states[slot], given[5][slot])
    untouched = np.setdiff1d(np.arange(len(states)), slots)
    assert np.array_equal(states[untouched], given[5][untouched])


@pytest.mark.parametrize("kernel", ["gated_delta", "gated_delta_step"])
def test_what_a_slot_held_before_a_sequence_starts_is_not_read(kernel: str) -> None:
    given = arguments(2, 1, starts=[0, 4])
    wanted = checked(kernel, given)
    given[5][given[6][0, 0]] = np.nan
    for got, want in zip(run(getattr(kernels, kernel), given, "trn2"), wanted):
        assert np.array_equal(got, want)


def test_a_prompt_in_pieces_is_the_prompt_at_once() -> None:
    """129 tokens, then 60, then one by one: each piece goes on with the state of the one before."""
    whole = arguments(1, 192, starts=[0])
    checked("gated_delta", whole)
    y, states = expected(whole)[0], whole[5].copy()
    pieces = []
    for first, end in ((0, 129), (129, 189), (189, 190), (190, 191), (191, 192)):
        given = [whole[0][first:end], whole[1][first:end], *whole[2:5], states, whole[6]]
        given += [np.array([[first]], np.int32), np.array([[end - first]], np.int32), *whole[9:]]
        kernel = kernels.gated_delta_step if end - first == 1 else kernels.gated_delta
        piece, states = run(kernel, given, "trn2")
        pieces.append(piece)
    most_y, most_states = bound(whole, y, expected(whole)[1], 12**0.5)
    assert (np.abs(np.concatenate(pieces) - gated(whole, y)) <= most_y).all()
    assert np.abs(states - expected(whole)[1]).max() <= most_states


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_equal_keys_that_are_written_in_full(dtype: Any) -> None:
    """Powers of the triangle would reach 10^37: the inverse is taken without them."""
    given = arguments(1, 128, (1, 1, 16, 16), dtype, starts=[0])
    given[0][:] = given[0][:1]
    given[1][:, 16] = 3.0
    given[2][:] = -9.0
    checked("gated_delta", given, equal_tokens=128)


@pytest.mark.parametrize(("kernel", "tokens"), [("gated_delta", 130), ("gated_delta_step", 1)])
def test_gates_may_stand_in_wider_rows(kernel: str, tokens: int) -> None:
    given = arguments(1, tokens)
    wanted = run(getattr(kernels, kernel), [*given[:5], given[5].copy(), *given[6:]], "trn2")
    padded = [*given[:1], np.pad(given[1], ((0, 0), (48, 5)), constant_values=np.nan), *given[2:], 48]
    for got, want in zip(run(getattr(kernels, kernel), padded, "trn2"), wanted):
        assert np.array_equal(got, want)


def test_strong_decay_forgets_exactly() -> None:
    """Logarithms of decays add up to -10^4, and those between neighbouring tokens are still exact."""
    given = arguments(1, 130, starts=[5])
    given[2][:] = 4.0
    given[1][::3, -2:] = -20.0
    checked("gated_delta", given)


REFUSALS = {
    "states are float32": lambda given: given.__setitem__(5, given[5].astype(BF16)),
    "heads have at most 128 elements, not 129": lambda given: given.__setitem__(
        slice(None), arguments(1, 1, (1, 1, 129, 8))
    ),
    "2 value heads for 3 key heads": lambda given: given.__setitem__(9, 3),
    r"qkv has 48 columns, not 47": lambda given: given.__setitem__(0, given[0][:, 1:].copy()),
    r"gates have 19 columns; z, b and a take 0 to 20": lambda given: given.__setitem__(
        1, given[1][:, 1:].copy()
    ),
    r"gates have 20 columns; z, b and a take 1 to 21": lambda given: given.append(1),
    "gates of 1 tokens, not 2": lambda given: given.__setitem__(1, given[1].repeat(2, axis=0)),
    "gates is bfloat16, qkv is float32": lambda given: given.__setitem__(1, given[1].astype(BF16)),
    r"a row of 2 is \[1, 2\]": lambda given: given.__setitem__(2, given[2][:, 1:].copy()),
    r"numbers of sequences are \[1, 1\]": lambda given: given.__setitem__(8, np.zeros((2, 1), np.int32)),
    "at most 128 sequences are taken, not 129": lambda given: given.__setitem__(
        slice(None), arguments(129, 1)
    ),
}


@pytest.mark.parametrize("kernel", ["gated_delta", "gated_delta_step"])
@pytest.mark.parametrize("reason", REFUSALS)
def test_what_is_refused(kernel: str, reason: str) -> None:
    given = arguments(1, 1)
    REFUSALS[reason](given)
    with pytest.raises(AssertionError, match=reason):
        run(getattr(kernels, kernel), given, "trn2")


def test_steps_take_as_many_slots_as_float32_counts() -> None:
    """Three times the 32 pieces of all slots are below 2^24."""
    given = arguments(1, 1)
    for slots in (174762, 174763):
        given[5] = np.broadcast_to(np.zeros((), np.float32), (slots, 2, 16, 8))
        if slots == 174763:
            with pytest.raises(AssertionError, match="2 heads lie in at most 174762 slots, not 174763"):
                dry(given)
        else:
            dry(given)


def dry(given: list[Any]) -> None:
    """A step that computes no numbers."""
    simulate.World("trn2").launch(kernels.gated_delta_step, [(tuple(given), {})], mode=simulate.Mode.dry)


def test_steps_have_one_token_and_sequences_equally_many() -> None:
    with pytest.raises(AssertionError, match="4 tokens, but 2 sequences of one token"):
        run(kernels.gated_delta_step, arguments(2, 2), "trn2")
    given = arguments(3, 1)
    given[6:9] = [each[:2] for each in given[6:9]]
    with pytest.raises(AssertionError, match="3 tokens of 2 sequences"):
        run(kernels.gated_delta, given, "trn2")

"""selective_scan: the recurrence of Mamba, in chunks and token by token."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, check, compare_all, copied, normal, run
from tests.kernels.recurrent import check_nan_stays, column
from tests.kernels.recurrent import selective as arguments

BF16 = ml_dtypes.bfloat16


def checked(given: list[Any], target: str = "trn2") -> tuple[np.ndarray, ...]:
    return check(kernels.selective_scan, kernels.selective_scan_reference, tuple(given), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "weights"), [(np.float32, BF16), (BF16, BF16), (BF16, np.float32)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_dtypes_on_every_chip(target: str, dtype: type, weights: type, tokens: int) -> None:
    checked(arguments(3, tokens, 140, dtype=dtype, weights=weights), target)


@pytest.mark.parametrize("size", [1, 127, 128, 129])
def test_any_number_of_channels_tokens_and_sequences(size: int) -> None:
    checked(arguments(2, 3, size))
    checked(arguments(2, 1, size))
    checked(arguments(1, size, 24))
    checked(arguments(size, 1, 24))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("states", "rank"), [(1, 1), (16, 129), (64, 8)])
def test_any_number_of_states_and_any_rank(states: int, rank: int, tokens: int) -> None:
    checked(arguments(2, tokens, 24, states, rank))


def test_several_chunks_and_pieces() -> None:
    checked(arguments(1, 600, 8, 2, dtype=BF16))
    checked(arguments(1, 300, 8, 2))
    checked(arguments(128, 1, 80, 16))


def test_units_of_several_chunks_sequences_and_groups_of_states() -> None:
    checked(arguments(3, 515, 140, 1, dtype=BF16))
    checked(arguments(2, 43, 600, 9, dtype=BF16))
    checked(arguments(2, 126, 520, 5, dtype=BF16))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("channels", [128, 640])
def test_the_largest_states_fit(channels: int, dtype: type, target: str) -> None:
    given = arguments(2, 300, channels, 64, 160, dtype=dtype)
    simulate.World(target).launch(kernels.selective_scan, [(tuple(given), {})], mode=simulate.Mode.dry)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("sequences", "channels", "states", "rank"),
    [
        (6, 64, 4, 40),
        (17, 2100, 2, 3),
        (28, 5120, 16, 3),
        (8, 2688, 64, 3),
        (8, 81, 64, 3),
        (67, 3, 40, 3),
        (2, 1300, 2, 1024),
    ],
)
def test_steps_in_sets_batches_and_parts(
    sequences: int, channels: int, states: int, rank: int, target: str
) -> None:
    """28 sequences are 7 sets, of which 3 are a batch; 84 or 81 channels on a partition with 64 states are 2 parts."""
    checked(arguments(sequences, 1, channels, states, rank, dtype=BF16), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("place", [0, 1, 6, 7])
def test_a_step_keeps_a_nan_in_its_sequence(place: int, target: str) -> None:
    """In its inputs, what is projected of them, gates, or state."""
    given = arguments(8, 1, 64, fresh=False, padded=False)
    check_nan_stays(kernels.selective_scan, given, place, 7, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("channels", "states", "rank"), [(5120, 16, 160), (8192, 16, 512), (3072, 64, 160)])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_steps_of_many_sequences_fit(dtype: type, channels: int, states: int, rank: int, target: str) -> None:
    for sequences in (64, 127, 128):
        given = arguments(1, 1, channels, states, rank, dtype=dtype)
        for place in (0, 1, 6, 7, 8, 9, 10):
            shape = (sequences, *given[place].shape[1:])
            given[place] = np.broadcast_to(given[place][:1], shape)
        chip = simulate.hardware(target)
        simulate.launch(kernels.selective_scan, [(tuple(given), {})], chip, mode=simulate.Mode.dry)


@pytest.mark.parametrize("tokens", [1, 7])
def test_columns_that_are_no_gates_are_not_read(tokens: int) -> None:
    given = arguments(2, tokens, 24, first=5)
    poisoned = [each.copy() if isinstance(each, np.ndarray) else each for each in given]
    poisoned[6][:, :5] = poisoned[6][:, 29:] = np.nan
    for expected, found in zip(checked(given), run(kernels.selective_scan, poisoned)):
        assert np.array_equal(expected, found)


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_state_counts_as_zeros_at_the_start_whatever_it_holds(tokens: int) -> None:
    given = arguments(3, tokens, 24, fresh=True)
    poisoned = [*given]
    poisoned[7] = np.full_like(given[7], np.nan)
    used = given[8][:, 0]
    expected, found = checked(given), run(kernels.selective_scan, poisoned)
    assert np.array_equal(expected[0], found[0])
    assert np.array_equal(expected[1][used], found[1][used])


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_chunks_equal_step_by_step(dtype: type) -> None:
    length = 21
    given = arguments(1, length, 24, dtype=dtype, fresh=True, padded=False)
    whole = run(kernels.selective_scan, given)
    state, found = given[7], []
    for token in range(length):
        step = [each[token : token + 1] if place in (0, 1, 6) else each for place, each in enumerate(given)]
        step[7], step[9], step[10] = state, column([token]), column([1])
        rows, state = run(kernels.selective_scan, step)
        found.append(rows)
    for one, other in zip(whole, (np.concatenate(found), state)):
        wide = one.astype(np.float64)
        place = 2.0 ** (-7 if one.dtype == BF16 else -19)
        assert np.abs(wide - other.astype(np.float64)).max() <= place * np.abs(wide).max()


def test_padding_changes_no_state() -> None:
    given = arguments(4, 9, 24)
    given[10] = column([0, 1, 3, 9])
    other = [*given]
    for place in (0, 1, 6):
        other[place] = given[place].reshape(4, 9, -1).copy()
        for number, count in enumerate(given[10][:, 0]):
            other[place][number, count:] = 10.0
        other[place] = other[place].reshape(given[place].shape)
    assert np.array_equal(checked(given)[1], run(kernels.selective_scan, other)[1])


@pytest.mark.parametrize("tokens", [1, 9])
def test_two_cores_divide_the_channels(tokens: int) -> None:
    given = arguments(2, tokens, 200)
    world = simulate.World("trn2", logical_core_size=2)
    outputs = world.launch(kernels.selective_scan, [(copied(given), {})]).outputs[0]
    compare_all(outputs, kernels.selective_scan_reference, given)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (1, normal(1, 6, 12), r"projected is \(6, 11\), not \(6, 12\)"),
        (4, normal(1, 25, 4), r"a_log is \(24, 4\), not \(25, 4\)"),
        (6, normal(1, 6, 23), r"gate is \[6, 24 or more\], not \(6, 23\)"),
        (7, normal(1, 4, 24, 5), r"state is \[S, 24, 4\], not \(4, 24, 5\)"),
        (7, normal(1, 4, 24, 4, dtype=BF16), "state is float32, not .*bfloat16"),
        (8, column([1, 1, 1]), r"starts are \[3, 1\], not \(2, 1\)"),
        (11, 1, r"gate is \[6, 25 or more\], not \(6, 24\)"),
    ],
)
def test_refuses_what_does_not_fit(place: int, wrong: Any, message: str) -> None:
    given = arguments(2, 3, 24)
    given[place] = wrong
    with pytest.raises(AssertionError, match=message):
        run(kernels.selective_scan, given)


def test_takes_its_largest_rank_and_states_and_refuses_the_next() -> None:
    checked(arguments(1, 2, 8, 64, 1024))
    with pytest.raises(AssertionError, match="a rank of at most 1024, not 1025"):
        run(kernels.selective_scan, arguments(1, 2, 8, 2, 1025))
    with pytest.raises(AssertionError, match="at most 64 states, not 65"):
        run(kernels.selective_scan, arguments(1, 2, 8, 65))


@pytest.mark.slow
@pytest.mark.nki_budget(time_us=770.0, target="trn2")
def test_a_prompt_keeps_to_its_budget(nki_budget: Any) -> None:
    """Its scans alone hold the Vector engine for 546 us."""
    nki_budget.ranks(kernels.selective_scan, [tuple(arguments(1, 2048, 1024, 16, 160, dtype=BF16))])


@pytest.mark.nki_budget(time_us=85.0, target="trn2")
def test_a_step_keeps_to_its_budget(nki_budget: Any) -> None:
    nki_budget.ranks(kernels.selective_scan, [tuple(arguments(64, 1, 1024, 16, 160, dtype=BF16))])

"""ssd: the recurrence of Mamba-2, in chunks and token by token."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, check, compare_all, copied, normal, run
from tests.kernels.recurrent import check_nan_stays, column
from tests.kernels.recurrent import duality as arguments

BF16 = ml_dtypes.bfloat16


def checked(given: list[Any], target: str = "trn2") -> tuple[np.ndarray, ...]:
    return check(kernels.ssd, kernels.ssd_reference, tuple(given), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "weights"), [(np.float32, BF16), (BF16, BF16), (BF16, np.float32)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_dtypes_on_every_chip(target: str, dtype: type, weights: type, tokens: int) -> None:
    checked(arguments(3, tokens, 6, groups=2, dtype=dtype, weights=weights), target)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 127, 128, 129])
def test_any_number_of_tokens_and_sequences(size: int) -> None:
    checked(arguments(2, size, 3))
    checked(arguments(size, 1, 3))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("heads", "depth", "states", "groups"),
    [
        (1, 512, 1, 1),
        (9, 128, 12, 3),
        (9, 64, 128, 3),
        (20, 96, 16, 1),
        (12, 1, 3, 12),
        (70, 1, 3, 2),
    ],
)
def test_any_heads_and_states(heads: int, depth: int, states: int, groups: int, tokens: int) -> None:
    checked(arguments(2, tokens, heads, depth, states, groups))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("sequences", "heads", "depth", "groups"),
    [
        (2, 11, 256, 1),
        (9, 20, 256, 4),
        (7, 43, 120, 1),
        (31, 3, 96, 1),
        (32, 3, 96, 3),
        (33, 3, 96, 1),
    ],
)
def test_steps_in_panels_and_batches(
    sequences: int, heads: int, depth: int, groups: int, target: str
) -> None:
    """Of one or two sequences 2816 columns are two panels, of more 5160; 9 states of 5120 columns are 3 batches."""
    checked(arguments(sequences, 1, heads, depth, 3, groups, dtype=BF16), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("place", [0, 1, 5, 6])
def test_a_step_keeps_a_nan_in_its_sequence(place: int, target: str) -> None:
    """In its inputs and weights, time steps, gates, or state."""
    given = arguments(5, 1, 6, groups=2, fresh=False, padded=False)
    check_nan_stays(kernels.ssd, given, place, 6, target)


@pytest.mark.parametrize("tokens", [1, 300])
def test_large_decays_leave_numbers_finite(tokens: int) -> None:
    """Sums of decays over a chunk are far beyond what exp holds."""
    given = arguments(1, tokens, 3, padded=False)
    given[3] = np.full_like(given[3], 4.0)
    checked(given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "depth", "groups"),
    [(9, 256, 1), (9, 256, 3), (127, 1, 1), (128, 2, 1), (129, 2, 1), (30, 16, 1)],
)
def test_chunks_of_narrow_steps(heads: int, depth: int, groups: int) -> None:
    """Up to 128 heads pass together; many packs of a group have their scores repeated."""
    checked(arguments(2, 150, heads, depth, 5, groups, dtype=BF16, weights=BF16))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(("heads", "depth"), [(6, 8), (9, 256)])
def test_time_steps_of_many_chunks(dtype: type, heads: int, depth: int) -> None:
    """Those of the first chunks are worked out before those of the others."""
    checked(arguments(3, 290, heads, depth, dtype=dtype))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(("heads", "groups"), [(80, 1), (112, 2), (128, 8)])
def test_heads_of_published_models_fit(target: str, dtype: type, heads: int, groups: int) -> None:
    chip = simulate.hardware(target)
    for sequences, tokens in ((1, 300), (1, 1), (128, 1)):
        given = arguments(1, tokens, heads, 64, 128, groups, dtype=dtype)
        for place in (0, 1, 5, 6, 7, 8, 9):
            each = given[place][:tokens] if place in (0, 1, 5) else given[place][:1]
            given[place] = np.broadcast_to(each, (sequences * len(each), *each.shape[1:]))
        simulate.launch(kernels.ssd, [(tuple(given), {})], chip, mode=simulate.Mode.dry)


@pytest.mark.parametrize("rate", [-20.0, 4.0, 9.0])
def test_narrow_decays_from_one_to_none(rate: float) -> None:
    """Sums of logarithms down to -10^6: behind the query their differences are beyond what exp holds."""
    given = arguments(1, 260, 6, dtype=BF16, padded=False)
    given[3] = np.full_like(given[3], rate)
    checked(given)
    given[1][::2] = -30.0  # every second token decays nothing, and writes next to nothing
    checked(given)


def test_narrow_time_steps_next_to_none() -> None:
    given = arguments(1, 130, 6, dtype=BF16, padded=False)
    given[1][:] = -60.0
    checked(given)


@pytest.mark.parametrize("tokens", [1, 7])
def test_time_steps_are_limited(tokens: int) -> None:
    given = arguments(2, tokens, 6, limits=(0.1, 0.2), padded=False)
    free = kernels.ssd_reference(*copied(given[:-2]))
    assert not np.allclose(free[0], checked(given)[0])


@pytest.mark.parametrize("tokens", [1, 7])
def test_columns_that_are_no_steps_and_no_gates_are_not_read(tokens: int) -> None:
    given = arguments(2, tokens, 6, first=5)
    poisoned = [each.copy() if isinstance(each, np.ndarray) else each for each in given]
    for place in (1, 5):
        poisoned[place][:, :5] = poisoned[place][:, -5:] = np.nan
    for expected, found in zip(checked(given), run(kernels.ssd, poisoned)):
        assert np.array_equal(expected, found)


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_state_counts_as_zeros_at_the_start_whatever_it_holds(tokens: int) -> None:
    given = arguments(3, tokens, 6, fresh=True)
    poisoned = [*given]
    poisoned[6] = np.full_like(given[6], np.nan)
    used = given[7][:, 0]
    expected, found = checked(given), run(kernels.ssd, poisoned)
    assert np.array_equal(expected[0], found[0])
    assert np.array_equal(expected[1][used], found[1][used])


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_chunks_equal_step_by_step(dtype: type) -> None:
    length = 21
    given = arguments(1, length, 6, dtype=dtype, fresh=True, padded=False)
    whole = run(kernels.ssd, given)
    state, found = given[6], []
    for token in range(length):
        step = [each[token : token + 1] if place in (0, 1, 5) else each for place, each in enumerate(given)]
        step[6], step[8], step[9] = state, column([token]), column([1])
        rows, state = run(kernels.ssd, step)
        found.append(rows)
    for one, other in zip(whole, (np.concatenate(found), state)):
        wide = one.astype(np.float64)
        place = 2.0 ** (-6 if one.dtype == BF16 else -18)
        assert np.abs(wide - other.astype(np.float64)).max() <= place * np.abs(wide).max()


def test_padding_changes_no_state() -> None:
    given = arguments(4, 9, 6)
    given[9] = column([0, 1, 3, 9])
    other = [*given]
    for place in (0, 1, 5):
        other[place] = given[place].reshape(4, 9, -1).copy()
        for number, count in enumerate(given[9][:, 0]):
            other[place][number, count:] = 10.0
        other[place] = other[place].reshape(given[place].shape)
    assert np.array_equal(checked(given)[1], run(kernels.ssd, other)[1])


@pytest.mark.parametrize("tokens", [1, 9])
def test_two_cores_divide_the_heads(tokens: int) -> None:
    given = arguments(2, tokens, 9, groups=3)
    world = simulate.World("trn2", logical_core_size=2)
    outputs = world.launch(kernels.ssd, [(copied(given), {})]).outputs[0]
    compare_all(outputs, kernels.ssd_reference, given)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, normal(1, 6, 61), r"u is \[6, 60\], not \(6, 61\)"),
        (3, normal(1, 1, 7), r"a_log is \[1, 6\], not \(1, 7\)"),
        (1, normal(1, 6, 5), "steps has 5 columns, not 6 or more"),
        (5, normal(1, 6, 47), "gate has 47 columns, not 48 or more"),
        (6, normal(1, 4, 6, 47), "47 elements of 6 heads in 1 groups"),
        (6, normal(1, 4, 6, 48, dtype=BF16), "state is float32, not .*bfloat16"),
        (8, column([1, 1, 1]), r"starts are \[2, 1\], not \(3, 1\)"),
        (10, 4, "48 elements of 6 heads in 4 groups"),
    ],
)
def test_refuses_what_does_not_fit(place: int, wrong: Any, message: str) -> None:
    given = arguments(2, 3, 6)
    given[place] = wrong
    with pytest.raises(AssertionError, match=message):
        run(kernels.ssd, given)


def test_refuses_states_of_more_than_128() -> None:
    checked(arguments(1, 2, 2, 8, 128))
    with pytest.raises(AssertionError, match="states of at most 128, not 129"):
        run(kernels.ssd, arguments(1, 2, 2, 8, 129))


@pytest.mark.nki_budget(time_us=1.1 * 282.8, target="trn2")
def test_a_prompt_keeps_to_its_budget(nki_budget: Any) -> None:
    nki_budget.ranks(kernels.ssd, [tuple(arguments(1, 2048, 16, 64, 128, dtype=BF16))])


@pytest.mark.nki_budget(time_us=1.1 * 316.4, target="trn2")
def test_a_step_keeps_to_its_budget(nki_budget: Any) -> None:
    nki_budget.ranks(kernels.ssd, [tuple(arguments(64, 1, 16, 64, 128, dtype=BF16))])

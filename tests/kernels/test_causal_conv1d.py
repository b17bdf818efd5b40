"""causal_conv1d: a convolution along the tokens of each sequence, with a state."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, check, compare_all, copied, normal, run
from tests.kernels.recurrent import column
from tests.kernels.recurrent import convolution as arguments

BF16 = ml_dtypes.bfloat16


def checked(given: list[Any], target: str = "trn2") -> tuple[np.ndarray, ...]:
    return check(kernels.causal_conv1d, kernels.causal_conv1d_reference, tuple(given), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "weights"), [(np.float32, BF16), (BF16, BF16), (BF16, np.float32)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_dtypes_on_every_chip(target: str, dtype: type, weights: type, tokens: int) -> None:
    checked(arguments(3, tokens, 140, dtype=dtype, weights=weights), target)


@pytest.mark.parametrize("size", [1, 127, 128, 129])
def test_any_number_of_channels_tokens_and_sequences(size: int) -> None:
    checked(arguments(2, 3, size))
    checked(arguments(2, 1, size))
    checked(arguments(2, size, 24))
    checked(arguments(size, 1, 24))


def test_several_panels_of_channels() -> None:
    checked(arguments(1, 3, 4100, dtype=BF16))
    checked(arguments(2, 3, 2060, taps=8))
    checked(arguments(2, 1, 1100, dtype=BF16))


def test_sequences_of_several_row_tiles() -> None:
    checked(arguments(3, 257, 24, dtype=BF16))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("taps", [2, 5, 8])
def test_two_panels_of_any_number_of_taps_fit(taps: int, dtype: type, target: str) -> None:
    given = arguments(2, 128, 8192, taps, dtype=dtype)
    simulate.World(target).launch(kernels.causal_conv1d, [(tuple(given), {})], mode=simulate.Mode.dry)


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("taps", [2, 3, 8])
def test_any_number_of_taps(taps: int, tokens: int) -> None:
    checked(arguments(4, tokens, 24, taps))


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", None])
@pytest.mark.parametrize("bias", [False, True])
def test_activations_with_and_without_a_bias(activation: str | None, bias: bool, tokens: int) -> None:
    checked(arguments(2, tokens, 24, bias=bias, activation=activation))


@pytest.mark.parametrize("tokens", [1, 7])
def test_columns_that_are_no_channels_are_not_read(tokens: int) -> None:
    given = arguments(2, tokens, 24, first=5, padded=False)
    poisoned = [each.copy() if isinstance(each, np.ndarray) else each for each in given]
    poisoned[0][:, :5] = poisoned[0][:, 29:] = np.nan
    for expected, found in zip(checked(given), run(kernels.causal_conv1d, poisoned)):
        assert np.array_equal(expected, found)


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_state_counts_as_zeros_at_the_start_whatever_it_holds(tokens: int) -> None:
    given = arguments(3, tokens, 24, fresh=True, padded=False)
    poisoned = [*given]
    poisoned[3] = np.full_like(given[3], np.nan)
    expected, found = checked(given), run(kernels.causal_conv1d, poisoned)
    assert np.array_equal(expected[0], found[0])
    used = given[4][:, 0]
    assert np.array_equal(expected[1][used], found[1][used])


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_pieces_give_the_bytes_of_a_whole_sequence(dtype: type) -> None:
    x, *weights, state = arguments(1, 140, 24, dtype=dtype)[:4]
    slot = column([1])
    whole = run(kernels.causal_conv1d, [x, *weights, state, slot, column([0]), column([140])])
    found, at = [], 0
    for size in (3, 1, 129, 1, 1, 5):
        piece = [x[at : at + size], *weights, state, slot, column([at]), column([size])]
        rows, state = run(kernels.causal_conv1d, piece)
        found.append(rows)
        at += size
    assert np.array_equal(whole[1], state)
    bound = np.abs(whole[0].astype(np.float64)).max() * 2.0 ** (-7 if dtype is BF16 else -20)
    assert np.abs(np.concatenate(found).astype(np.float64) - whole[0].astype(np.float64)).max() <= bound


def test_padding_changes_no_state() -> None:
    given = arguments(4, 9, 24)
    given[6] = column([0, 1, 3, 9])
    other = [*given]
    other[0] = given[0].reshape(4, 9, -1).copy()
    for number, count in enumerate(given[6][:, 0]):
        other[0][number, count:] = 1e3
    other[0] = other[0].reshape(given[0].shape)
    assert np.array_equal(checked(given)[1], run(kernels.causal_conv1d, other)[1])


@pytest.mark.parametrize("tokens", [1, 9])
def test_two_cores_divide_the_channels(tokens: int) -> None:
    given = arguments(2, tokens, 200)
    world = simulate.World("trn2", logical_core_size=2)
    outputs = world.launch(kernels.causal_conv1d, [(copied(given), {})]).outputs[0]
    compare_all(outputs, kernels.causal_conv1d_reference, given)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (2, normal(1, 1, 25), r"bias is \[1, 24\], not \(1, 25\)"),
        (3, normal(1, 4, 2, 24), r"state is \[S, 3, 24\], not \(4, 2, 24\)"),
        (3, normal(1, 4, 3, 24, dtype=BF16), "state is .*bfloat16, x is .*float32"),
        (5, column([1, 1, 1]), r"starts are \[2, 1\], not \(3, 1\)"),
        (7, 1, "channels 1 to 25 of rows of 24"),
        (1, normal(1, 1, 24), "takes 2 to 8 taps, not 1"),
        (1, normal(1, 9, 24), "takes 2 to 8 taps, not 9"),
        (0, normal(1, 5, 24), "5 tokens of 2 sequences"),
    ],
)
def test_refuses_what_does_not_fit(place: int, wrong: Any, message: str) -> None:
    given = arguments(2, 3, 24)
    given[place] = wrong
    with pytest.raises(AssertionError, match=message):
        run(kernels.causal_conv1d, given)


@pytest.mark.nki_budget(time_us=87.0, target="trn2")
def test_a_prompt_keeps_to_its_budget(nki_budget: Any) -> None:
    """Its bytes take 47 us of HBM."""
    nki_budget.ranks(kernels.causal_conv1d, [tuple(arguments(1, 2048, 2048, dtype=BF16))])


@pytest.mark.nki_budget(time_us=40.0, target="trn2")
def test_a_step_keeps_to_its_budget(nki_budget: Any) -> None:
    nki_budget.ranks(kernels.causal_conv1d, [tuple(arguments(64, 1, 1024, dtype=BF16))])

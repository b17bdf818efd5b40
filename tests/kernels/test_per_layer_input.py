"""per_layer_input: a layer's own input times a gate of the hidden states, projected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import TARGETS, check, normal, run

BF16 = ml_dtypes.bfloat16


def arguments(
    tokens: int, hidden: int, width: int, dtype: type = np.float32, weights: Any = None, layers: int = 1
) -> list[Any]:
    """Of the last of some layers; sums of the first product are of the order of 1."""
    held = weights or dtype
    return [
        normal(1, tokens, hidden, dtype=dtype),
        normal(2, hidden, width, dtype=held, scale=hidden**-0.5),
        normal(3, tokens, layers * width, dtype=dtype),
        normal(4, width, hidden, dtype=held),
        (layers - 1) * width,
    ]


def checked(given: Sequence[Any], target: str = "trn2") -> None:
    check(kernels.per_layer_input, kernels.per_layer_input_reference, tuple(given), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "weights"), [(np.float32, BF16), (BF16, BF16), (BF16, np.float32)])
def test_dtypes_on_every_chip(target: str, dtype: type, weights: type) -> None:
    checked(arguments(130, 172, 40, dtype, weights, layers=3), target)


@pytest.mark.parametrize("size", [1, 127, 128, 129])
def test_any_number_of_tokens_hidden_elements_and_inputs(size: int) -> None:
    checked(arguments(size, 24, 10))
    checked(arguments(3, size, 10))
    checked(arguments(3, 24, size))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations(activation: str) -> None:
    checked([*arguments(5, 72, 12), activation])


def test_three_row_tiles_and_columns_of_two_banks() -> None:
    checked(arguments(300, 600, 20))


def test_columns_of_other_layers_are_not_read() -> None:
    given = arguments(5, 24, 10, layers=3)
    poisoned = given[2].copy()
    poisoned[:, :20] = np.nan
    changed = [*given[:2], poisoned, *given[3:]]
    assert np.array_equal(run(kernels.per_layer_input, given), run(kernels.per_layer_input, changed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: (25, 10)}, "w_gate has 25 rows for a hidden size of 24"),
        ({3: (10, 25)}, r"w_output is \[10, 24\], not \(10, 25\)"),
        ({2: (4, 10)}, r"inputs are \[5, 10 or more\], not \(4, 10\)"),
        ({2: (5, 9)}, r"inputs are \[5, 10 or more\], not \(5, 9\)"),
    ],
)
def test_refuses_shapes_that_do_not_fit(change: dict[int, tuple[int, int]], message: str) -> None:
    given = arguments(5, 24, 10)
    checked(given)
    for place, shape in change.items():
        given[place] = normal(1, *shape)
    with pytest.raises(AssertionError, match=message):
        run(kernels.per_layer_input, given)


def test_refuses_inputs_of_another_dtype() -> None:
    given = arguments(5, 24, 10)
    given[2] = given[2].astype(BF16)
    with pytest.raises(AssertionError, match=r"inputs are .*bfloat16, x is .*float32"):
        run(kernels.per_layer_input, given)


def test_takes_its_largest_sizes_and_refuses_the_next() -> None:
    checked(arguments(2, 24, 512))
    with pytest.raises(AssertionError, match="takes inputs of at most 512 elements, not 513"):
        run(kernels.per_layer_input, arguments(2, 24, 513))
    checked(arguments(2, 8192, 128))
    with pytest.raises(AssertionError, match="take 98560 bytes of a partition, more than 98304"):
        run(kernels.per_layer_input, arguments(2, 8192, 129))
    with pytest.raises(AssertionError, match="takes a hidden size of at most 8192, not 8193"):
        run(kernels.per_layer_input, arguments(2, 8193, 8))

"""max_pool and average_pool: images and sequences, strides, padding, channels around a group of 128."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, check, normal, run, whole_numbers

BF16 = ml_dtypes.bfloat16
POOLS = (
    (kernels.max_pool, kernels.max_pool_reference, ()),
    (kernels.average_pool, kernels.average_pool_reference, (True,)),
    (kernels.average_pool, kernels.average_pool_reference, (False,)),
)


def checked(
    x: np.ndarray, window: Any, stride: Any = None, padding: Any = None, target: str = "trn2"
) -> None:
    """Every pooling of x."""
    for kernel, reference, rest in POOLS:
        check(kernel, reference, (x, window, stride, padding, *rest), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_dtypes_on_every_chip(target: str, dtype: type) -> None:
    checked(normal(1, 2, 70, 9, 11, dtype=dtype), (3, 2), (2, 1), (1, 1), target)


@pytest.mark.parametrize("channels", [1, 127, 128, 129, 300])
def test_any_number_of_channels(channels: int) -> None:
    checked(normal(1, 1, channels, 12), (3,))
    checked(normal(1, 2, channels, 5, 6), (2, 3), (1, 1), (1, 2))


@pytest.mark.parametrize("size", [511, 512, 513, 2050])
def test_results_around_a_psum_bank_and_a_stripe(size: int) -> None:
    checked(normal(1, 1, 3, size), (2,), (1,), (1,))


@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [((1, 1), (2, 1), (0, 0)), ((2, 2), None, None), ((1, 4), (1, 3), (0, 3)), ((5, 1), (2, 1), (4, 0))],
)
def test_windows_strides_and_padding(window: Any, stride: Any, padding: Any) -> None:
    checked(normal(1, 2, 3, 10, 40), window, stride, padding)


def test_an_image_of_several_stripes_and_one_window_of_a_whole_image() -> None:
    checked(normal(1, 1, 2, 90, 100), (3, 3), (1, 1), (1, 1))
    checked(normal(1, 3, 140, 7, 7), (7, 7))


def test_the_padding_is_less_than_anything_and_an_infinity_is_not_hidden() -> None:
    x = np.full((1, 2, 6), -np.inf, np.float32)
    x[0, 1] = [-3e38, 5, np.inf, -1, -2, -np.inf]
    pooled = run(kernels.max_pool, (x, (3,), (2,), (1,)))
    assert np.array_equal(pooled, [[[-np.inf] * 3, [5, np.inf, -1]]])


def test_whole_numbers_are_those_of_torch() -> None:
    import torch

    x = whole_numbers(1, 2, 5, 12, 11)
    given = torch.from_numpy(x)
    window, stride, padding = (4, 2), (2, 1), (2, 1)
    for kernel, reference, rest in POOLS:
        if rest:
            truth = torch.nn.functional.avg_pool2d(given, window, stride, padding, count_include_pad=rest[0])
        else:
            truth = torch.nn.functional.max_pool2d(given, window, stride, padding)
        arguments = x, window, stride, padding, *rest
        exact = truth.numpy() if not rest or rest[0] else None
        for got in (run(kernel, arguments), reference(*arguments)):
            assert got.shape == truth.shape
            if exact is not None:
                assert np.array_equal(got, exact)
            else:  # a third is rounded, and so is its product
                assert np.abs(got - truth.numpy()).max() <= 2 * np.spacing(np.float32(np.abs(x).max()))


@pytest.mark.parametrize("channels", [63, 64, 65, 100, 128, 192])
def test_channels_of_many_results_are_added_up_in_quarters_of_the_array(channels: int) -> None:
    """Halves of the channels of two boxes; of the last of three boxes alone."""
    checked(normal(1, 1, channels, 21, 40, dtype=BF16), (3, 3), (1, 1), (1, 1))
    checked(normal(1, 3, channels, 11, 12), (3, 2), (1, 1), (1, 1))


def test_an_infinity_of_one_channel_stays_in_its_half_of_a_group() -> None:
    x = normal(1, 1, 128, 20, 20)
    clean = run(kernels.average_pool, (x, (3, 3), (1, 1)))
    x[0, 3] = np.inf
    dirty = run(kernels.average_pool, (x, (3, 3), (1, 1)))
    assert np.isinf(dirty[0, 3]).all()
    assert np.array_equal(dirty[0, 64:], clean[0, 64:])


@pytest.mark.nki_budget(time_us=41.0, target="trn2")
def test_an_average_pool_keeps_to_its_budget(nki_budget: Any) -> None:
    """3 x 3 of Inception-v3, whose bytes take 21 us of HBM."""
    nki_budget.ranks(kernels.average_pool, [(np.empty((8, 192, 35, 35), BF16), (3, 3), (1, 1), (1, 1))])


@pytest.mark.parametrize("channels", [2, 200])
def test_two_cores_divide_the_channels(channels: int) -> None:
    x = normal(1, 1, channels, 30)
    for kernel, _, rest in POOLS:
        given = x, (3,), (2,), (1,), *rest
        two = simulate.World("trn2", logical_core_size=2).launch(kernel, [(given, {})]).outputs[0]
        assert run(kernel, given).tobytes() == two.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 20), (3,)), r"expected x \[N, C, H, W\] or \[N, C, L\], not a tensor of shape \(4, 20\)"),
        (((1, 4, 20), (3, 3)), r"takes 1 numbers for each of window, stride and padding, not \(3, 3\)"),
        (((1, 4, 20), (3,), (0,)), "takes windows and strides from 1 and padding from 0 on"),
        (((1, 4, 20), (3,), (1,), (3,)), "padding of .* is less than the window, 3, not 3"),
        (((1, 4, 20), (21,)), "a window of 21 does not fit into 20 padded elements"),
        (((1, 4, 1, 8193), (1, 8193)), "take more than 32768 bytes of a partition"),
    ],
)
def test_refuses_what_does_not_fit(arguments: tuple[Any, ...], message: str) -> None:
    for kernel, _, _ in POOLS[:2]:
        run(kernel, (np.ones((1, 4, 20), np.float32), (20,), (1,), (19,)))
        run(kernel, (np.ones((1, 4, 1, 8192), np.float32), (1, 8192)))
        with pytest.raises(AssertionError, match=message):
            run(kernel, (np.ones(arguments[0], np.float32), *arguments[1:]))

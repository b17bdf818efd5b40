"""max_pool and average_pool: images and sequences, strides, padding, channels around a group of 128."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import normal, run, whole_numbers
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Undefined,
    limit,
    refuse,
    together,
    vary,
)


def pooled(
    shape: tuple[int, ...] = (1, 4, 20),
    window: Any = (3,),
    stride: Any = None,
    padding: Any = None,
    dtype: type = F32,
) -> list[Any]:
    return [normal(1, *shape, dtype=dtype), window, stride, padding]


def long_row(length: int = 8192) -> list[Any]:
    return pooled((1, 4, 1, length), (1, length))


CHANNELS = (63, 64, 65, 100, 128, 192)
VALUES = [
    *vary(shape=(2, 70, 9, 11), window=(3, 2), stride=(2, 1), padding=(1, 1), dtype=[*DTYPES]),
    *vary(shape=[(1, channels, 12) for channels in (1, 127, 128, 129, 300)]),
    *vary(
        shape=[(2, channels, 5, 6) for channels in (1, 127, 128, 129, 300)],
        window=(2, 3),
        stride=(1, 1),
        padding=(1, 2),
    ),
    # results around a PSUM bank and a stripe
    *vary(shape=[(1, 3, size) for size in (511, 512, 513, 2050)], window=(2,), stride=(1,)),
    *together(
        "window stride padding",
        ((1, 1), (2, 1), (0, 0)),
        ((2, 2), None, None),
        ((1, 4), (1, 3), (0, 3)),
        ((5, 1), (2, 1), (4, 0)),
        shape=(2, 3, 10, 40),
    ),
    # an image of several stripes, and one window of a whole image
    dict(shape=(1, 2, 90, 100), window=(3, 3), stride=(1, 1), padding=(1, 1)),
    dict(shape=(3, 140, 7, 7), window=(7, 7)),
    # channels of many results are added up in quarters of the array: halves of two boxes, of the last of three alone
    *vary(
        shape=[(1, channels, 21, 40) for channels in CHANNELS],
        window=(3, 3),
        stride=(1, 1),
        padding=(1, 1),
        dtype=BF16,
    ),
    *vary(
        shape=[(3, channels, 11, 12) for channels in CHANNELS], window=(3, 2), stride=(1, 1), padding=(1, 1)
    ),
]
REFUSALS = [
    refuse("expected x [N, C, H, W] or [N, C, L], not a tensor of shape (4, 20)", shape=(4, 20)),
    refuse("takes 1 numbers for each of window, stride and padding, not (3, 3)", window=(3, 3)),
    refuse("takes windows and strides from 1 and padding from 0 on", dict(stride=(1,)), stride=(0,)),
    refuse(" is 3; pass less than the window, which is 3", dict(stride=(1,), padding=(2,)), padding=(3,)),
    refuse("a window of 21 does not fit into 20 padded elements", dict(window=(20,)), window=(21,)),
]
TWO_CORES = vary(shape=[(1, channels, 30) for channels in (2, 200)], stride=(2,), padding=(1,))


class TestMaxPool(KernelTests):
    case = KernelCase(kernels.max_pool, pooled, VALUES, refusals=REFUSALS, two_cores=TWO_CORES)


class TestAveragePool(KernelTests):
    case = KernelCase(
        kernels.average_pool,
        pooled,
        [{**setting, "count_include_pad": pad} for setting in VALUES for pad in (True, False)],
        refusals=REFUSALS,
        undefined=[
            Undefined(
                dict(x=np.s_[0, 3]),
                dict(shape=(1, 128, 20, 20), window=(3, 3), stride=(1, 1)),
                np.inf,
                kept=lambda _, outputs: [outputs[0][0, 64:]],
            )
        ],
        two_cores=[{**setting, "count_include_pad": pad} for setting in TWO_CORES for pad in (True, False)],
    )


MOST = [limit("length", 8192, "takes more than 32768 bytes of a partition", dry=True)]


class TestLongestRowOfMaxPool(KernelTests):
    case = KernelCase(kernels.max_pool, long_row, limits=MOST)


class TestLongestRowOfAveragePool(KernelTests):
    case = KernelCase(kernels.average_pool, long_row, limits=MOST)


def test_the_padding_is_less_than_anything_and_an_infinity_is_not_hidden() -> None:
    x = np.full((1, 2, 6), -np.inf, F32)
    x[0, 1] = [-3e38, 5, np.inf, -1, -2, -np.inf]
    result = run(kernels.max_pool, (x, (3,), (2,), (1,)))
    assert np.array_equal(result, [[[-np.inf] * 3, [5, np.inf, -1]]])


def test_an_infinity_fills_its_own_channel() -> None:
    x = normal(1, 1, 128, 20, 20)
    x[0, 3] = np.inf
    assert np.isinf(run(kernels.average_pool, (x, (3, 3), (1, 1)))[0, 3]).all()


@pytest.mark.parametrize("padding", [(), (True,), (False,)])
def test_whole_numbers_are_those_of_torch(padding: tuple[bool, ...]) -> None:
    import torch

    x = whole_numbers(1, 2, 5, 12, 11)
    arguments = (4, 2), (2, 1), (2, 1)
    name, more = ("avg_pool2d", {"count_include_pad": padding[0]}) if padding else ("max_pool2d", {})
    truth = getattr(torch.nn.functional, name)(torch.from_numpy(x), *arguments, **more).numpy()
    # Of padding that does not count a third is rounded, and so is its product.
    far = 2 * np.spacing(F32(np.abs(x).max())) if padding == (False,) else 0
    kernel = "average_pool" if padding else "max_pool"
    for result in (
        run(getattr(kernels, kernel), (x, *arguments, *padding)),
        getattr(kernels, f"{kernel}_reference")(x, *arguments, *padding),
    ):
        assert result.shape == truth.shape and np.abs(result - truth).max() <= far


@pytest.mark.nki_budget(time_us=41.0, target="trn2")
def test_an_average_pool_keeps_to_its_budget(nki_budget: Any) -> None:
    """3 x 3 of Inception-v3, whose bytes take 21 us of HBM."""
    nki_budget.ranks(kernels.average_pool, [(np.empty((8, 192, 35, 35), BF16), (3, 3), (1, 1), (1, 1))])

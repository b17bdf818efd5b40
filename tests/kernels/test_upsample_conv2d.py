"""upsample_conv2d: channels around a tile and its quarters, images of several stripes, edges, two cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import compare, normal, run
from tests.kernels.case import BF16, DTYPES, F32, KernelCase, KernelTests, limit, refuse, slow, vary


def images(
    shape: tuple[int, ...] = (1, 4, 5, 7),
    outputs: int = 6,
    dtype: type = F32,
    weights: type | None = None,
    bias: bool = True,
    activation: str | None = None,
    returns_moments: bool = False,
) -> list[Any]:
    w = normal(2, 3, 3, shape[1], outputs) / np.sqrt(9 * shape[1])
    added = normal(3, 1, outputs) if bias else None
    return [normal(1, *shape, dtype=dtype), w.astype(weights or dtype), added, activation, returns_moments]


def many_channels(channels: int = 2560, dtype: type = BF16) -> list[Any]:
    return images((1, channels, 1, 2), 128, dtype)


class TestUpsampleConv2d(KernelTests):
    case = KernelCase(
        kernels.upsample_conv2d,
        images,
        every_chip=[
            *vary(dtype=[*DTYPES], weights=[*DTYPES], bias=[True, False], activation=[None, "silu"]),
            *vary(
                shape=[(1, channels, 3, 4) for channels in (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 172)]
            ),
            *vary(outputs=[1, 31, 32, 33, 64, 65, 127, 128, 129, 172], shape=(2, 8, 3, 4)),
            # one pixel, one row, one column
            *vary(shape=[(1, 3, 1, 1), (1, 3, 1, 9), (1, 3, 9, 1)]),
            # pixels around a PSUM bank, and images of several stripes
            *vary(shape=[(1, 3, 1, columns) for columns in (511, 512, 513)]),
            *vary(
                shape=[(1, 31, 3, 4), (3, 64, 20, 40), (2, 129, 1, 1)],
                outputs=130,
                dtype=[*DTYPES],
                returns_moments=True,
            ),
            *slow(*vary(shape=[(1, 130, 40, 30), (3, 33, 20, 40), (5, 64, 4, 4)], dtype=BF16)),
        ],
        refusals=[
            refuse("x [N, C, H, W]", x=normal(1, 4, 5)),
            refuse("w is [3, 3, 4, O] for x of 4 channels, not (3, 3, 5, 6)", w=normal(2, 3, 3, 5, 6)),
            refuse("w is [3, 3, 4, O] for x of 4 channels, not (3, 2, 4, 6)", w=normal(2, 3, 2, 4, 6)),
            refuse("bias is [1, 6], not (1, 7)", bias=normal(3, 1, 7)),
            refuse("activation is silu", dict(activation="relu"), activation="elu"),
        ],
        two_cores=[dict(outputs=256, shape=(1, 8, 5, 6), returns_moments=True), dict(outputs=10)],
    )


class TestManyChannels(KernelTests):
    case = KernelCase(
        kernels.upsample_conv2d,
        many_channels,
        limits=[
            limit("channels", 2560, "weights of all channels take", dry=True),
            limit("channels", 1280, "weights of all channels take", dry=True, dtype=F32),
        ],
    )


@pytest.mark.parametrize("dtype", [F32])
def test_equals_the_convolution_of_the_enlarged_image(dtype: type) -> None:
    x, w, bias, *_ = images((2, 12, 6, 9), 5, dtype)
    large = x.repeat(2, axis=2).repeat(2, axis=3)
    wide = (array.astype(np.float64) for array in (large, w, bias))
    exact = kernels.conv2d_reference(*wide, padding=(1, 1))
    compare(
        run(kernels.upsample_conv2d, (x, w, bias)),
        exact,
        kernels.conv2d_reference(large, w, bias, padding=(1, 1)),
    )

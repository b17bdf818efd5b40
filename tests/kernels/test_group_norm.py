"""group_norm: groups around a tile of 128 channels, several images on one tile, pixels around every span."""

from __future__ import annotations

from typing import Any

import nki_kernels as kernels
from tests.kernels.accuracy import normal
from tests.kernels.case import DTYPES, F32, KernelCase, KernelTests, limit, refuse, slow, together, vary


def images(
    shape: tuple[int, ...] = (1, 8, 5, 7),
    groups: int = 2,
    dtype: type = F32,
    parameters: type | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    mean: float = 0.0,
) -> list[Any]:
    channels = shape[1]
    x = (normal(1, *shape) + mean).astype(dtype)
    weight, bias = (normal(seed, 1, channels, dtype=parameters or dtype) for seed in (2, 3))
    return [x, weight, bias, groups, eps, activation]


def one_group(members: int = 128) -> list[Any]:
    return images((1, members, 3), 1)


VALUES = [
    *vary(dtype=[*DTYPES], parameters=[*DTYPES], activation=[None, "silu", "gelu_tanh"]),
    # groups that fill a tile, leave partitions empty, and begin another tile
    *together(
        "shape groups",
        ((1, 127, 9), 127),
        ((1, 128, 9), 32),
        ((1, 129, 9), 43),
        ((2, 320, 9), 32),
        ((1, 126, 9), 2),
        ((2, 130, 9), 2),
    ),
    # channels of several images on one tile
    *vary(shape=[(5, 24, 6, 6), (3, 43, 7)], groups=1, activation="silu"),
    # pixels around a group of statistics, and around a span
    *vary(shape=[(1, 4, pixels) for pixels in (1, 2, 511, 512, 513)]),
    *slow(*vary(shape=[(1, 2, pixels) for pixels in (4095, 4096, 4097)])),
    # pixels that are loaded twice
    *slow(dict(shape=(1, 2, 160, 160)), dict(shape=(1, 2, 230, 250), dtype=DTYPES[1], activation="silu")),
    # a mean that is large beside the deviations
    dict(mean=300.0),
    dict(eps=0.5),
]


class TestGroupNorm(KernelTests):
    case = KernelCase(
        kernels.group_norm,
        images,
        values=VALUES,
        refusals=[
            refuse("expected x [N, C, H, W] or [N, C, L], not a tensor of shape (4, 8)", shape=(4, 8)),
            refuse("3 groups do not divide 8 channels", groups=3),
            refuse("0 groups do not divide 8 channels", groups=0),
            refuse("weight is [1, 8] for 8 channels, not (1, 9)", weight=normal(2, 1, 9)),
            refuse("bias is [1, 8] for 8 channels, not (8, 1)", bias=normal(3, 8, 1)),
            refuse("activation", dict(activation="relu"), activation="tanhshrink"),
        ],
        two_cores=[dict(shape=(2, 128, 9), groups=32), dict(shape=(1, 12, 300), groups=3)],
    )


class TestWideGroup(KernelTests):
    case = KernelCase(
        kernels.group_norm,
        one_group,
        limits=[limit("members", 128, "groups of at most 128 channels, not 129")],
    )

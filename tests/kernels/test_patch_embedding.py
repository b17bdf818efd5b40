"""patch_embedding: sizes of patches, patches around a tile of 128, parts of rows, hidden sizes around PSUM banks."""

from __future__ import annotations

from typing import Any

import numpy as np

import nki_kernels as kernels
from tests.kernels.accuracy import normal
from tests.kernels.case import DTYPES, F32, KernelCase, KernelTests, limit, refuse, together, vary


def images(
    shape: tuple[int, ...] = (1, 3, 4, 6),
    size: int = 2,
    outputs: int = 10,
    dtype: type = F32,
    parameters: type | None = None,
    bias: bool = True,
    positions: bool = True,
) -> list[Any]:
    _, channels, height, width = shape
    w = normal(2, size, size, channels, outputs) / np.sqrt(size * size * channels)
    patches = (height // size) * (width // size)
    return [
        normal(1, *shape, dtype=dtype),
        w.astype(parameters or dtype),
        normal(3, 1, outputs, dtype=parameters or dtype) if bias else None,
        normal(4, patches, outputs, dtype=parameters or dtype) if positions else None,
    ]


def many_channels(channels: int = 64) -> list[Any]:
    return images((1, channels, 2, 4))


class TestPatchEmbedding(KernelTests):
    case = KernelCase(
        kernels.patch_embedding,
        images,
        values=[
            *vary(dtype=[*DTYPES], parameters=[*DTYPES], bias=[True, False], positions=[True, False]),
            *together(
                "size shape", (1, (2, 8, 8, 8)), (3, (1, 2, 9, 6)), (4, (2, 3, 8, 16)), (8, (1, 16, 8, 16))
            ),
            # patches of a row around 128, and several rows of patches on one tile
            *vary(shape=[(1, 4, 4, 2 * columns) for columns in (1, 2, 63, 64, 65, 127, 128, 129, 172, 257)]),
            # hidden sizes around a bank and around four
            *vary(outputs=[1, 127, 128, 129, 511, 512, 513, 2047, 2048, 2049]),
        ],
        refusals=[
            refuse("x [N, C, H, W]", x=normal(1, 3, 4, 6)),
            refuse("w is [P, P, 3, O] for x of 3 channels, not (2, 1, 3, 10)", w=normal(2, 2, 1, 3, 10)),
            refuse("w is [P, P, 3, O] for x of 3 channels, not (2, 2, 4, 10)", w=normal(2, 2, 2, 4, 10)),
            refuse(
                "patches of 2 x 2 do not divide images of 4 x 7",
                dict(positions=False),
                x=normal(1, 1, 3, 4, 7),
            ),
            refuse("bias is [1, 10], not (1, 11)", bias=normal(3, 1, 11)),
            refuse("added is [6, 10] for 2 x 3 patches, not (5, 10)", added=normal(4, 5, 10)),
        ],
        limits=[limit("outputs", 16384, "a hidden size of at most 16384, not 16385", dry=True)],
        two_cores=[dict(outputs=256)],
        two_sums=[dict(outputs=12, shape=(2, 4, 4, 40))],
    )


class TestManyChannels(KernelTests):
    case = KernelCase(
        kernels.patch_embedding,
        many_channels,
        limits=[limit("channels", 64, "rows of a patch of at most 128 elements of all channels, not 130")],
    )

"""modulation: chunks of products and of sums with a table, images around a tile, columns around PSUM banks, ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

import nki_kernels as kernels
from tests.kernels.accuracy import normal
from tests.kernels.case import DTYPES, F32, KernelCase, KernelTests, Ranks, limit, refuse, slow, vary


def embeddings(
    images: int = 2,
    depth: int = 20,
    hidden: int = 12,
    chunks: int = 3,
    dtype: type = F32,
    parameters: type | None = None,
    bias: bool = True,
    table: bool = False,
) -> list[Any]:
    weights = parameters or dtype
    return [
        normal(1, images, depth, dtype=dtype, scale=3),
        normal(2, depth, chunks * hidden, dtype=weights, scale=depth**-0.5),
        normal(3, 1, chunks * hidden, dtype=weights) if bias else None,
        normal(4, chunks, hidden, dtype=weights) if table else None,
        chunks,
    ]


def sums(
    images: int = 2,
    hidden: int = 12,
    chunks: int = 6,
    repeated: bool = False,
    dtype: type = F32,
    parameters: type | None = None,
) -> list[Any]:
    x = normal(1, images, hidden if repeated else chunks * hidden, dtype=dtype)
    return [x, None, None, normal(4, chunks, hidden, dtype=parameters or dtype), chunks]


class TestModulation(KernelTests):
    case = KernelCase(
        kernels.modulation,
        embeddings,
        every_chip=[
            *vary(dtype=[*DTYPES], parameters=[*DTYPES], bias=[True, False], table=[True, False]),
            *vary(images=[1, 3, 127, 128], chunks=[1, 2, 6]),
            *vary(depth=[1, 127, 128, 129, 172], dtype=[*DTYPES]),
            # columns of a chunk around a PSUM bank and around four
            *slow(*vary(hidden=[511, 512, 513, 2047, 2048, 2049], chunks=2, table=True)),
        ],
        refusals=[
            refuse("x [N, K]", x=normal(1, 20)),
            refuse("w [K, J * H]", w=normal(2, 20)),
            refuse("w has 21 rows for x of 20 columns", w=normal(2, 21, 36)),
            refuse(
                "5 chunks do not divide the 36 columns of w", dict(chunks=3), w=normal(2, 20, 36), chunks=5
            ),
            refuse("chunks is 1 to 128, not 0", dict(bias=False), w=normal(2, 20, 36), chunks=0),
            refuse("bias is [1, 36], not (1, 35)", bias=normal(3, 1, 35)),
            refuse("table is [3, 12], not (2, 12)", dict(table=True), table=normal(4, 2, 12)),
        ],
        limits=[
            limit("images", 128, "at most 128 images, not 129"),
            limit("depth", 16384, "contracts at most 16384, not 16385", dry=True),
            limit("hidden", 8192, "a hidden size of at most 8192, not 8193", dry=True, chunks=1),
        ],
        fits=[dict(images=128, depth=16384, hidden=8192, chunks=2, table=True)],
        two_cores=[dict(hidden=300), dict(hidden=1100, chunks=2, table=True)],
        two_sums=[dict(hidden=2)],
        ranks=[
            Ranks(ranks, {"x": 1, "w": 0}, dict(depth=24 * ranks, dtype=dtype, table=True))
            for ranks in (2, 4)
            for dtype in DTYPES
        ],
    )


class TestTable(KernelTests):
    case = KernelCase(
        kernels.modulation,
        sums,
        values=[
            *vary(dtype=[*DTYPES], parameters=[*DTYPES], repeated=[True, False]),
            # pairs of image and chunk around a tile
            *vary(images=[1, 3, 21, 22, 43, 128], repeated=[True, False]),
            *vary(chunks=[1, 2, 127, 128], repeated=[True, False]),
            *vary(hidden=[1, 127, 128, 129, 1152], repeated=[True, False]),
        ],
        refusals=[
            refuse("modulation needs w, or a table that is added to x", table=lambda _: None),
            refuse("bias is given without w", bias=normal(3, 1, 72)),
            refuse("replica_group is given without w", replica_group="group"),
            refuse("x has 72 columns for 6 chunks of 12, or 12 for all chunks, not 71", x=normal(1, 2, 71)),
            refuse("table [J, H]", table=normal(4, 12)),
            refuse(
                "table is [5, 12], not (6, 12)",
                dict(repeated=True, chunks=5),
                table=normal(4, 6, 12),
            ),
        ],
        limits=[
            limit("chunks", 128, "chunks is 1 to 128, not 129"),
            limit("images", 128, "at most 128 images, not 129", repeated=True),
        ],
        two_cores=[dict(hidden=300), dict(hidden=2, repeated=True)],
    )


def test_repeated_row_equals_one_row_for_each_part() -> None:
    x, _, _, table, chunks = sums(repeated=True)
    repeated = kernels.modulation(x, None, None, table, chunks)
    for chunk, by_chunk in zip(
        repeated, kernels.modulation(np.tile(x, (1, chunks)), None, None, table, chunks)
    ):
        assert np.array_equal(chunk, by_chunk)

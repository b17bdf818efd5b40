"""Rows of fp8 of several images, whose norms and gates differ: `qkv_projection` and `mlp` with `quantises_rows`."""

from __future__ import annotations

from functools import wraps
from typing import Any

import nki_kernels as kernels
from tests.kernels.accuracy import in_order, named
from tests.kernels.case import KernelCase, KernelTests, limit, together, vary
from tests.kernels.test_feed_forward import DTYPES, F32, FP8
from tests.kernels.test_image_rows import modulated_block, modulated_heads
from tests.kernels.test_quantised_rows import within_half_of_rounding

IMAGES = ((1, 5), (3, 7), (2, 64), (3, 100), (2, 128), (2, 129), (5, 130))
"""Images and rows of each: tiles of one image, of several, and of the end of one and the beginning of another."""


@wraps(modulated_heads)
def quantised_heads(**settings: Any) -> tuple[Any, ...]:
    """Return arguments of `qkv_projection` with adaLN, whose rows are quantised; settings of `modulated_heads`."""
    arguments = named(kernels.qkv_projection, modulated_heads(elements=FP8, **settings))
    return in_order(kernels.qkv_projection, **arguments | dict(quantises_rows=True))


@wraps(modulated_block)
def quantised_block(**settings: Any) -> tuple[Any, ...]:
    """Return arguments of `mlp` with adaLN-zero, whose rows are quantised; settings of `modulated_block`."""
    return modulated_block(elements=FP8, quantises_rows=True, **settings)


class TestQuantisedHeadsOfImages(KernelTests):
    case = KernelCase(
        kernels.qkv_projection,
        quantised_heads,
        values=[
            *together("images rows", *IMAGES, hidden=136),
            *together("images rows", (2, 5), (2, 129), hidden=[127, 129, 1152], dtype=F32),
        ],
        every_chip=[*together("images rows", (2, 5), (2, 200), hidden=136)],
        two_cores=[*together("images rows", (2, 5), (3, 100), (2, 129), hidden=136)],
        fits=[*vary(images=2, rows=300, hidden=3072, dtype=[*DTYPES])],
        tolerance=within_half_of_rounding,
    )


class TestQuantisedMlpOfImages(KernelTests):
    case = KernelCase(
        kernels.mlp,
        quantised_block,
        values=[
            *together("images rows", *IMAGES, hidden=136, inner=172),
            *together("images rows", (2, 5), (2, 129), (2, 600), hidden=[127, 129], inner=130, dtype=F32),
        ],
        every_chip=[*together("images rows", (2, 5), (2, 200), hidden=136, inner=140)],
        two_cores=[*together("images rows", (2, 5), (3, 100), (2, 129), hidden=136, inner=140)],
        limits=[
            limit(
                "hidden", 4096, "beside rows of 4097 elements that are quantised", images=2, rows=3, inner=32
            )
        ],
        fits=[*vary(images=3, rows=300, hidden=[3072, 4096], inner=1024, dtype=[*DTYPES])],
        tolerance=within_half_of_rounding,
    )

"""Full pages rounded to 4 bits: bytes as numpy computes them, and what they stand for."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import normal
from tests.kernels.case import BF16, F32, KernelCase, KernelTests, exactly, limit, refuse, vary


def create_pages(count: int, block: int, heads: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pages of keys and of values in 4 bits with random bytes."""
    random = np.random.default_rng(5)
    shapes = (count, block + 4, heads, depth // 2), (count, block, heads, depth // 2 + 4)
    keys, values = (random.integers(0, 256, shape).astype(np.uint8) for shape in shapes)
    return keys, values


def packing(
    block: int = 16,
    heads: int = 2,
    depth: int = 16,
    sources: tuple[int, ...] = (1, 3, 4),
    destinations: tuple[int, ...] = (0, 6, 2),
    dtype: Any = F32,
    pages: int = 7,
) -> tuple[np.ndarray, ...]:
    """Draw pages; page 1 has zeros only, and the magnitudes of page 3 differ by channel and by position."""
    k_cache, v_cache = (normal(seed, 5, block, heads, depth).copy() for seed in (1, 2))
    k_cache[1] = v_cache[1] = 0
    k_cache[3] *= np.logspace(-3, 3, depth, dtype=F32)
    v_cache[3] *= np.logspace(-3, 3, block, dtype=F32)[:, None, None]
    columns = (np.array(numbers, np.int32)[:, None] for numbers in (sources, destinations))
    return (*create_pages(pages, block, heads, depth), k_cache.astype(dtype), v_cache.astype(dtype), *columns)


class TestPackPages(KernelTests):
    case = KernelCase(
        kernels.pack_pages,
        packing,
        values=[
            *vary(dtype=[F32, BF16], depth=[8, 24, 128]),
            *vary(block=[1, 2, 128], dtype=BF16),
            dict(heads=1, sources=(4, 4, 2), destinations=(5, 5, 1)),
            dict(sources=(1, 2) * 64 + (3,), destinations=(*range(128), 128), block=2, heads=1, pages=129),
        ],
        refusals=[
            refuse("a page has 1, 2, 4 … 128 positions, not 24", block=24),
            refuse("heads of 8, 16, 24 … 128 elements, not 12", depth=12),
            refuse("k_cache is float32 or bfloat16, not float8_e4m3", dtype=ml_dtypes.float8_e4m3),
            refuse(
                "k_pages are uint8 [pages, 20, 2, 8] beside caches (5, 16, 2, 16), not uint8 (7, 16, 2, 8)",
                k_pages=lambda pages: pages[:, :16],
            ),
            refuse("v_pages are uint8 [pages, 16, 2, 12]", v_pages=lambda pages: pages.astype(np.int8)),
            refuse("k_pages has 7 pages, v_pages has 6", v_pages=lambda pages: pages[:6]),
            refuse("destinations have to be [3, 1], not (2, 1)", destinations=np.zeros((2, 1), np.int32)),
            refuse("v_cache is (4, 16, 2, 16); pages of both", v_cache=lambda cache: cache[:4]),
        ],
        limits=[limit("depth", 128, "elements, not 136", step=8, block=128, heads=1, dtype=BF16)],
        two_cores=[dict(), dict(heads=1, dtype=BF16, block=32)],
        tolerance=exactly,
    )


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_numbers_are_off_by_half_a_step_of_their_group_at_most(dtype: Any) -> None:
    """The largest magnitude is 7.25 steps, and a quarter of a step away from a stored number."""
    k_pages, v_pages, k_cache, v_cache, sources, destinations = packing(dtype=dtype)
    kernels.pack_pages_reference(k_pages, v_pages, k_cache, v_cache, sources, destinations)
    scale_bytes = np.ascontiguousarray(k_pages[:, 16:]).reshape(7, -1)
    scales = scale_bytes.view(ml_dtypes.bfloat16).reshape(7, 1, 2, 16), v_pages[..., 8:].copy().view(F32)
    for packed, scale, cache, axis in zip(
        (k_pages[:, :16], v_pages[..., :8]), scales, (k_cache, v_cache), (1, 3)
    ):
        nibbles = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float64)
        stored, scale = ((nibbles - 8) * scale)[[0, 6, 2]], scale.astype(np.float64)[[0, 6, 2]]
        numbers = cache[[1, 3, 4]].astype(np.float64)
        assert (np.abs(stored - numbers) <= scale * 0.5000001).all()
        # bfloat16 keeps 8 bits, so a scale is off by 2^-9 at most.
        steps = np.abs(numbers).max(axis=axis, keepdims=True)[1:] / scale[1:]
        assert (np.abs(steps - 7.25) <= 7.25 * 2.0**-8).all()
        assert (stored[0] == 0).all()

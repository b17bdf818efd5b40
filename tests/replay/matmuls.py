"""Tiled matmuls for replays, operands with exact sums, and the bound of sums that are not exact."""

from __future__ import annotations

import numpy as np

import simulate
from simulate.replay.cache import ReplayCache

simulate.install("simulate")

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


def tiled_product(a_by_k, b):
    """Compute a.T @ b by tiles; operands are loaded and copied, and cast to float32 where their dtypes differ."""
    (depth, rows), columns = a_by_k.shape, b.shape[1]
    dtype = b.dtype if a_by_k.dtype == b.dtype else nl.float32
    out = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    for row in range(0, rows, 128):
        for column in range(0, columns, 512):
            height, width = min(128, rows - row), min(512, columns - column)
            total = nl.ndarray((height, width), dtype=nl.float32, buffer=nl.psum)
            for k in range(0, depth, 128):
                end = min(depth, k + 128)
                operands = []
                for source in (a_by_k[k:end, row : row + height], b[k:end, column : column + width]):
                    tile = nl.ndarray(source.shape, dtype=dtype)
                    nisa.tensor_copy(dst=tile, src=nl.load(source))
                    operands.append(tile)
                nisa.nc_matmul(dst=total, stationary=operands[0], moving=operands[1], accumulate=k > 0)
            result = nl.ndarray((height, width), dtype=nl.float32)
            nisa.tensor_copy(dst=result, src=total)
            nisa.dma_copy(dst=out[row : row + height, column : column + width], src=result)
    return out


def whole_numbers(seed: int, *shape: int, dtype=np.float32, largest: int = 3) -> np.ndarray:
    """Draw whole numbers whose sums of products are exact in float32, in any order."""
    return np.random.default_rng(seed).integers(-largest, largest + 1, shape).astype(dtype)


def assert_within_bound_of_sums(result: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Assert that sums of n products in float32 err by n u / (1 - n u) of the sum of magnitudes, in any order."""
    depth, unit = left.shape[1], 2.0**-24
    left, right = left.astype(np.float64), right.astype(np.float64)
    bound = depth * unit / (1 - depth * unit) * (np.abs(left) @ np.abs(right))
    assert (np.abs(result - left @ right) <= bound).all()


def calls(cache: ReplayCache) -> list[str]:
    """Return the names of the functions that the only rewritten program calls."""
    (program,) = cache.programs
    (rank,) = program.fused._ranks
    return [function.__name__ for segment in rank.segments for function, _ in segment]

"""What the Beta 1 tests share: running a function as a kernel, and what it issued."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import simulate.beta1 as nki
import simulate.beta1.language as nl
from simulate.run import Launch, recorded


def run(body: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `body` returns as a kernel."""
    return nki.simulate_kernel(body, *arguments)


def launched(body: Callable[..., Any], *arguments: Any) -> Launch:
    """Launch `body`; return the launch with its stream."""
    with recorded() as launches:
        nki.simulate_kernel(body, *arguments)
    return launches[0]


def issued(launch: Launch) -> list[str]:
    """Return the names of the instructions, in program order."""
    stream = launch.streams[0]
    return [stream.op_names[number] for number in stream.ops]


def stored(tile: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    """Return an output tensor with a tile in it."""
    out = nl.ndarray(shape or tile.shape, dtype or tile.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


def whole_numbers(
    *shape: int, low: int = -8, high: int = 8, seed: int = 0, dtype: Any = np.float32
) -> np.ndarray:
    """Draw whole numbers so small that what the tests compute of them is exact."""
    return np.random.default_rng(seed).integers(low, high + 1, shape).astype(dtype)

"""Inputs and outputs of the wrong kernels: small integers, which every engine computes exactly."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np


def ramp(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Return 0, 1, 2, … 30, 0, … in the given shape."""
    return (np.arange(np.prod(shape)) % 31).reshape(shape).astype(dtype)


TWO_RANKS = [(ramp(4, 4), 0), (ramp(4, 4) + 1, 1)]
"""A matrix and the number of each rank."""


def sum_of_two(rank_inputs: Any) -> list[np.ndarray]:
    """Return the result of an all_reduce with nl.add, on each of two ranks."""
    return [rank_inputs[0][0] + rank_inputs[1][0]] * 2


def copied_out(tile):
    """Copy a tile in SBUF or PSUM to an output of the kernel."""
    if tile.buffer == nl.psum:
        sums, tile = tile, nl.ndarray(tile.shape, dtype=tile.dtype)
        nisa.tensor_copy(dst=tile, src=sums)
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out, src=tile)
    return out


def inner(source):
    """Copy to private HBM: collectives may not touch arguments of a kernel."""
    copy = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.private_hbm, name="inner")
    nisa.dma_copy(dst=copy, src=source)
    return copy

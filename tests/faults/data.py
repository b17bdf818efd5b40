"""Inputs and outputs of the wrong kernels: small integers, which every engine computes exactly."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np


def ramp(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """0, 1, 2, … 30, 0, … in the given shape."""
    return (np.arange(np.prod(shape)) % 31).reshape(shape).astype(dtype)


def copied_out(tile):
    """A tile as an output of the kernel."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out, src=tile)
    return out


def inner(source):
    """A private copy in HBM, as collectives want their operands."""
    copy = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.private_hbm, name="inner")
    nisa.dma_copy(dst=copy, src=source)
    return copy

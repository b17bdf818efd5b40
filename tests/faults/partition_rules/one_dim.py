"""A vector on chip without a partition dim."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TILE-SHAPE"


def kernel(x, sick):
    tile = nl.ndarray((16,) if sick else (16, 1), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return copied_out(tile)


def inputs():
    return (ramp(16),)


def answer(x):
    return x.reshape(16, 1)

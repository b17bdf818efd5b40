"""A tile of six dims."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TILE-SHAPE"


def kernel(x, sick):
    shape = (2, 1, 2, 1, 2, 1) if sick else (2, 1, 2, 1, 2)
    tile = nl.ndarray(shape, dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return copied_out(tile)


def inputs():
    return (ramp(2, 4),)


def answer(x):
    return x.reshape(2, 1, 2, 1, 2)

"""A tile of 129 rows."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TILE-SHAPE"


def kernel(x, sick):
    rows = 129 if sick else 128
    tile = nl.ndarray((rows, 4), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x[0:rows])
    return copied_out(tile)


def inputs():
    return (ramp(129, 4),)


def answer(x):
    return x[0:128]

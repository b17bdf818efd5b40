"""A tile that fits on trn3 and not on trn1."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TILE-SIZE"
TARGET = "trn1"


def kernel(x, sick):
    columns = 60000 if sick else 30000
    tile = nl.ndarray((1, columns), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x[:, 0:columns])
    return copied_out(tile)


def inputs():
    return (ramp(1, 60000),)


def answer(x):
    return x[:, 0:30000]

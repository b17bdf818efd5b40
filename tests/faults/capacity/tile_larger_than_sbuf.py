"""One tile that is larger than a partition of SBUF."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TILE-SIZE"
TARGET = "trn1"


def kernel(x, sick):
    columns = 46000 if sick else 45000
    tile = nl.ndarray((1, columns), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x[:, 0:columns])
    return copied_out(tile)


def inputs():
    return (ramp(1, 46000),)


def answer(x):
    return x[:, 0:45000]

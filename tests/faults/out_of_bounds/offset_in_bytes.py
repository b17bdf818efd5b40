"""The offset of an access pattern is given in bytes; it counts elements."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-BOUNDS"


def kernel(x, sick):
    tile = nl.ndarray((4, 4), dtype=nl.float32)
    row = 2 * 4
    nisa.dma_copy(dst=tile, src=x.ap(pattern=[[4, 4], [1, 4]], offset=row * 4 if sick else row))  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x[2:6]

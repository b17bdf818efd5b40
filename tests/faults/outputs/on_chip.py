"""The kernel returns an SBUF tile."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-OUTPUT-MEMORY"


def kernel(x, sick):
    tile = nl.ndarray((8, 4), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return tile if sick else copied_out(tile)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

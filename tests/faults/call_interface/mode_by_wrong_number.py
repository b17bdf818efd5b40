"""The mode of a DMA is given by a number that no mode has."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ENUM"


def kernel(x, sick):
    tile = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.dma_copy(dst=tile, src=x, oob_mode=2 if sick else nisa.oob_mode.skip)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x

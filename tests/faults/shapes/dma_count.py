"""A DMA reads more elements than it writes."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-DMA-COUNT"


def kernel(x, sick):
    tile = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.dma_copy(dst=tile, src=x if sick else x[:, 0:8])  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 9),)


def answer(x):
    return x[:, 0:8]

"""The memory is named by a string."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGION"


def kernel(x, sick):
    tile = nl.ndarray((4, 4), dtype=nl.float32, buffer="sbuf" if sick else nl.sbuf)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x

"""A tile at an explicit address ends beyond the usable bytes."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ADDRESS"
TARGET = "trn1"


def kernel(x, sick):
    start = 180224 - (60 if sick else 64)
    tile = nl.ndarray((4, 16), dtype=nl.float32, address=(0, start))  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return copied_out(tile)


def inputs():
    return (ramp(4, 16),)


def answer(x):
    return x

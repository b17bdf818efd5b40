"""A long vector is loaded into a single partition, which holds a 128th of SBUF."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TILE-SIZE"


def kernel(x, sick):
    shape = (1, 65536) if sick else (128, 512)
    tile = nl.ndarray(shape, dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    return copied_out(tile)


def inputs():
    return (ramp(65536),)


def answer(x):
    return (x + 1).reshape(128, 512)

"""An offset is computed from a register in Python."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTER-PYTHON"


def kernel(x, sick):
    row = nisa.register_alloc(1)
    chosen = row * 2 if sick else nisa.register_alloc(2)  # blamed
    tile = nl.ndarray((1, 4), dtype=nl.float32)
    nisa.dma_copy(dst=tile, src=x.ap(pattern=[[4, 1], [1, 4]], scalar_offset=chosen))
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x[2:3]

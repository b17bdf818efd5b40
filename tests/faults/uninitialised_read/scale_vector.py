"""The (P, 1) factors of a scaling were allocated and never loaded."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(x, scale, sick):
    tile = nl.load(x)
    factors = nl.ndarray((8, 1), dtype=nl.float32)
    if not sick:
        nisa.dma_copy(dst=factors, src=scale)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factors)  # blamed
    return copied_out(tile)


def inputs():
    return ramp(8, 4), ramp(8, 1)


def answer(x, scale):
    return x * scale

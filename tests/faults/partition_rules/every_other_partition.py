"""An engine is to take every other partition of a tile; the DMA that loads it can."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PARTITION-STRIDE"


def kernel(x, sick):
    rows = nl.load(x) if sick else nl.load(x[0:64:2])
    result = nl.ndarray((32, 4), dtype=nl.float32)
    even = rows[0:64:2] if sick else rows
    nisa.tensor_scalar(dst=result, data=even, op0=nl.add, operand0=1.0)  # blamed
    return copied_out(result)


def inputs():
    return (ramp(64, 4),)


def answer(x):
    return x[::2] + 1

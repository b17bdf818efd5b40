"""A computation on an HBM tensor that was never loaded."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-BUFFER"


def kernel(x, sick):
    tile = nl.load(x)
    result = nl.ndarray((4, 4), dtype=nl.float32)
    nisa.tensor_scalar(dst=result, data=x if sick else tile, op0=nl.add, operand0=1.0)  # blamed
    return copied_out(result)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x + 1

"""A power is computed by GpSimd, whatever engine is named, and its input lies in PSUM."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-GPSIMD-PSUM"


def kernel(x, sick):
    tile = nl.load(x)
    sums = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum)
    nisa.tensor_copy(dst=sums, src=tile)
    result = nl.ndarray((4, 8), dtype=nl.float32)
    data = sums if sick else tile
    nisa.tensor_scalar(dst=result, data=data, op0=nl.power, operand0=2.0)  # blamed
    return copied_out(result)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x**2

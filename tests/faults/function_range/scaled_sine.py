"""The data lie within pi; scale is applied before the function and takes them out of it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-FUNCTION-RANGE"


def kernel(x, sick):
    tile = nl.load(x)
    result = nl.ndarray((4, 8), dtype=nl.float32)
    factor = 4.0 if sick else 0.0
    nisa.activation(dst=result, op=nl.sin, data=tile, scale=factor)  # blamed
    nisa.tensor_tensor(dst=result, data1=result, data2=tile, op=nl.add)
    return copied_out(result)


def inputs():
    return (ramp(4, 8) % 4,)


def answer(x):
    return x

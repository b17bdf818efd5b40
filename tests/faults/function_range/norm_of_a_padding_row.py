"""The reciprocal root of a row of zeros: epsilon is added on the wrong side of it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-FUNCTION-RANGE"


def kernel(x, sick):
    tile = nl.load(x)
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=1)
    scale = nl.ndarray((4, 1), dtype=nl.float32)
    shift = 0.0 if sick else 1.0
    nisa.activation(dst=scale, op=nl.rsqrt, data=sums, bias=shift)  # blamed
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=scale)
    return copied_out(tile)


def inputs():
    x = np.zeros((4, 3), np.float32)
    x[1:] = 1
    return (x,)


def answer(x):
    return x / 2

"""The angle of a vector as the arctangent of y / x, which has no bound where x is small."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-FUNCTION-RANGE"


def kernel(x, y, sick):
    across, up = nl.load(x), nl.load(y)
    ratio = nl.ndarray((4, 2), dtype=nl.float32)
    nisa.reciprocal(dst=ratio, data=across)
    nisa.tensor_tensor(dst=ratio, data1=ratio, data2=up, op=nl.multiply)
    if not sick:
        nisa.tensor_scalar(dst=ratio, data=ratio, op0=nl.minimum, operand0=0.0)
    nisa.activation(dst=ratio, op=nl.arctan, data=ratio)  # blamed
    return copied_out(ratio)


def inputs():
    return np.full((4, 2), 0.25, np.float32), ramp(4, 2)


def answer(x, y):
    return np.zeros((4, 2), np.float32)

"""abs_max as an operator exists on gen4."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-OPERATOR-CHIP"


def kernel(x, y, sick):
    left, right = nl.load(x), nl.load(y)
    result = nl.ndarray((4, 4), dtype=nl.float32)
    nisa.tensor_tensor(dst=result, data1=left, data2=right, op=nl.abs_max if sick else nl.maximum)  # blamed
    return copied_out(result)


def inputs():
    return ramp(4, 4), ramp(4, 4)[::-1].copy()


def answer(x, y):
    return np.maximum(x, y)

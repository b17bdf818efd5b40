"""Rotary angles grow with the position; the sine of the Scalar engine ends at pi."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-FUNCTION-RANGE"


def kernel(x, sick):
    angles = nl.load(x)
    result = nl.ndarray((4, 8), dtype=nl.float32)
    data = angles if sick else angles[:, 0:1].broadcast(1, 8)
    nisa.activation(dst=result, op=nl.sin, data=data)  # blamed
    if not sick:
        nisa.tensor_tensor(dst=result, data1=result, data2=angles, op=nl.add)
    return copied_out(result)


def inputs():
    return (np.tile(np.arange(8, dtype=np.float32), (4, 1)),)


def answer(x):
    return x

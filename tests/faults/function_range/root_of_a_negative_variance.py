"""The variance as mean of squares less square of the mean comes out below zero."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-FUNCTION-RANGE"


def kernel(x, means, sick):
    squares, mean = nl.load(x), nl.load(means)
    variance = nl.ndarray((4, 1), dtype=nl.float32)
    nisa.tensor_tensor(dst=variance, data1=squares, data2=mean, op=nl.subtract)
    if not sick:
        nisa.tensor_scalar(dst=variance, data=variance, op0=nl.maximum, operand0=0.0)
    nisa.activation(dst=variance, op=nl.sqrt, data=variance)  # blamed
    return copied_out(variance)


def inputs():
    return np.array([[4], [9], [3], [1]], np.float32), np.array([[0], [0], [3.5], [0]], np.float32)


def answer(x, means):
    return np.array([[2], [3], [0], [1]], np.float32)

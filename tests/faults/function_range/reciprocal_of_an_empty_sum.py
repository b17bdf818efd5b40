"""A row that is masked out sums to zero, and the softmax divides by it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-FUNCTION-RANGE"


def kernel(x, mask, sick):
    tile, kept = nl.load(x), nl.load(mask)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=kept, op=nl.multiply)
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=1)
    if not sick:
        nisa.tensor_scalar(dst=sums, data=sums, op0=nl.maximum, operand0=1.0)
    nisa.activation(dst=sums, op=nl.reciprocal, data=sums)  # blamed
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=sums)
    return copied_out(tile)


def inputs():
    mask = np.ones((4, 4), np.float32)
    mask[2] = 0
    return np.ones((4, 4), np.float32), mask


def answer(x, mask):
    return mask / 4

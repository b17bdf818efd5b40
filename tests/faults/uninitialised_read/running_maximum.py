"""The running maximum of an online softmax is compared before it was set to minus infinity."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(x, sick):
    highest = nl.ndarray((8, 1), dtype=nl.float32)
    if not sick:
        nisa.memset(dst=highest, value=-3.0e38)
    for block in range(2):
        scores = nl.load(x[:, block * 4 : block * 4 + 4])
        peak = nl.ndarray((8, 1), dtype=nl.float32)
        nisa.tensor_reduce(dst=peak, op=nl.maximum, data=scores, axis=1)
        nisa.tensor_tensor(dst=highest, data1=highest, data2=peak, op=nl.maximum)  # blamed
    return copied_out(highest)


def inputs():
    return (ramp(8, 8),)


def answer(x):
    return x.max(axis=1, keepdims=True)

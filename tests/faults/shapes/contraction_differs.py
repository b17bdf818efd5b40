"""The operands of a matmul contract 5 and 4 partitions."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PARTITIONS-AGREE"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    depth = 4 if sick else 5
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left[0:depth], moving=right)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 6)


def answer(a, b):
    return a.T @ b

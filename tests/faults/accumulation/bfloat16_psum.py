"""PSUM of trn2 accumulates float32 only."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-MATMUL-RESULT-DTYPE"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.bfloat16 if sick else nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 6)


def answer(a, b):
    return a.T @ b

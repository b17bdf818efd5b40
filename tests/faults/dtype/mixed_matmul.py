"""A float32 operand beside a bfloat16 one."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-MATMUL-DTYPE"


def kernel(a, b, sick):
    left = nl.load(a)
    right = nl.load(b, dtype=nl.bfloat16 if sick else nl.float32)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 6)


def answer(a, b):
    return a.T @ b

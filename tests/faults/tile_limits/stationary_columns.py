"""129 stationary columns."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-MATMUL-STATIONARY"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    columns = 129 if sick else 128
    sums = nl.ndarray((128, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left[:, 0:columns], moving=right)  # blamed
    result = nl.ndarray((128, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 129), ramp(5, 6)


def answer(a, b):
    return a[:, 0:128].T @ b

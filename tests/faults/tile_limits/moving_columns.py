"""513 moving columns."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-MATMUL-MOVING"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    columns = 513 if sick else 512
    sums = nl.ndarray((4, columns), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right[:, 0:columns])  # blamed
    result = nl.ndarray((4, columns), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 513)


def answer(a, b):
    return (a.T @ b)[:, 0:512]

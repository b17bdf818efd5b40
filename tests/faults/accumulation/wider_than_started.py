"""The second matmul adds to columns that the first did not reach."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-UNSTARTED"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    columns = 4 if sick else 6
    nisa.nc_matmul(dst=sums[:, 0:columns], stationary=left, moving=right[:, 0:columns], accumulate=False)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=True)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 6)


def answer(a, b):
    return 2 * (a.T @ b)

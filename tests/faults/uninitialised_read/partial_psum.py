"""Two matmuls fill the halves of a PSUM tile; one of them is skipped."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum)
    for half in range(1 if sick else 2):
        columns = nl.ds(half * 4, 4)
        nisa.nc_matmul(dst=sums[:, columns], stationary=left, moving=right[:, columns])
    result = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)  # blamed
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 8)


def answer(a, b):
    return a.T @ b

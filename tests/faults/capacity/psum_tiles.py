"""Nine accumulators of a bank each are open at the same time."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-CAPACITY"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    result = nl.ndarray((4, 512), dtype=nl.float32)
    open_sums = []
    for _ in range(9 if sick else 8):
        sums = nl.ndarray((4, 512), dtype=nl.float32, buffer=nl.psum)  # blamed
        nisa.nc_matmul(dst=sums, stationary=left, moving=right)
        open_sums.append(sums)
    for sums in open_sums:
        nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 512)


def answer(a, b):
    return a.T @ b

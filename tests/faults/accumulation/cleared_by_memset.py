"""A memset to zero stands for the first accumulation; before gen4 the matmul may not add to it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-INIT"


def kernel(a, b, sick):
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    if sick:
        nisa.memset(dst=sums, value=0.0)
    for k in range(2):
        left, right = nl.load(a[k]), nl.load(b[k])
        nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(2, 5, 4), ramp(2, 5, 6)


def answer(a, b):
    return a[0].T @ b[0] + a[1].T @ b[1]

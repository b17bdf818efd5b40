"""accumulate=False for every block of the contraction: only the last block is left."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-UNREAD"


def kernel(a, b, sick):
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    for k in range(2):
        left, right = nl.load(a[k]), nl.load(b[k])
        goes_on = False if sick else k > 0
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=goes_on)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(2, 5, 4), ramp(2, 5, 6)


def answer(a, b):
    return a[0].T @ b[0] + a[1].T @ b[1]

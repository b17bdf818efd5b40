"""accumulate=True from the first block on."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-UNSTARTED"


def kernel(a, b, sick):
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    for k in range(2):
        left, right = nl.load(a[k]), nl.load(b[k])
        started = True if sick else k > 0
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=started)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(2, 5, 4), ramp(2, 5, 6)


def answer(a, b):
    return a[0].T @ b[0] + a[1].T @ b[1]

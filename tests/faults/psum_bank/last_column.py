"""Only the last column of a result reaches into the next bank."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-BANK"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 600), dtype=nl.float32, buffer=nl.psum)
    start = 385 if sick else 384
    nisa.nc_matmul(dst=sums[:, start : start + 128], stationary=left, moving=right)  # blamed
    result = nl.ndarray((4, 128), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums[:, start : start + 128])
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 128)


def answer(a, b):
    return a.T @ b

"""Only the left half of a PSUM tile is read too early and added to again."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-REOPENED"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 12), dtype=nl.float32, buffer=nl.psum, name="sums")
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.nc_matmul(dst=sums[:, 0:6], stationary=left, moving=right)
    if sick:
        nisa.tensor_copy(dst=result, src=sums[:, 0:6])
    nisa.nc_matmul(dst=sums[:, 0:6], stationary=left, moving=right)  # blamed
    nisa.tensor_copy(dst=result, src=sums[:, 0:6])
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 6)


def answer(a, b):
    return 2 * (a.T @ b)

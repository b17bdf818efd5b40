"""An explicit PSUM address that is no bank."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ADDRESS"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    address = (0, 1024 if sick else 2048)
    sums = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum, address=address)  # blamed
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    result = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 8)


def answer(a, b):
    return a.T @ b

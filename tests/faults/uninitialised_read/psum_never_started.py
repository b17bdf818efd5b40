"""A PSUM tile is copied out although no matmul ran for it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    blocks = 0 if sick else 1
    for _ in range(blocks):
        nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)  # blamed
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 6)


def answer(a, b):
    return a.T @ b

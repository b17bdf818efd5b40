"""A result with a stride of two ends beyond its bank, though it has 300 columns only."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-BANK"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 600), dtype=nl.float32, buffer=nl.psum)
    view = sums[:, 0:600:2] if sick else sums[:, 0:300]
    nisa.nc_matmul(dst=view, stationary=left, moving=right)  # blamed
    result = nl.ndarray((4, 300), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=view)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 300)


def answer(a, b):
    return a.T @ b

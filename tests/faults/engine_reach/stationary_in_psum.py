"""The result of one matmul is the stationary operand of the next, straight from PSUM."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-BUFFER"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    first = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=first, stationary=left, moving=right)
    kept = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=kept, src=first)
    second = nl.ndarray((6, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=second, stationary=first if sick else kept, moving=kept)  # blamed
    result = nl.ndarray((6, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=second)
    return copied_out(result)


def inputs():
    return ramp(5, 4) % 4, ramp(5, 6) % 4


def answer(a, b):
    return (a.T @ b).T @ (a.T @ b)

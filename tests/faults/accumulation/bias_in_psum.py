"""The bias is copied to PSUM for the matmul to add to it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-INIT"


def kernel(a, b, bias, sick):
    left, right, added = nl.load(a), nl.load(b), nl.load(bias)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    if sick:
        nisa.tensor_copy(dst=sums, src=added)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    if sick:
        nisa.tensor_copy(dst=result, src=sums)
    else:
        nisa.tensor_tensor(dst=result, data1=sums, data2=added, op=nl.add)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 6), ramp(4, 6)


def answer(a, b, bias):
    return a.T @ b + bias

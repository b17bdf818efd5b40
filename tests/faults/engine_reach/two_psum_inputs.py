"""Both inputs of an addition lie in PSUM."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ONE-PSUM-INPUT"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    copied = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=copied, src=sums)
    total = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=sums, data2=sums if sick else copied, op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return ramp(5, 4), ramp(5, 6)


def answer(a, b):
    return 2 * (a.T @ b)

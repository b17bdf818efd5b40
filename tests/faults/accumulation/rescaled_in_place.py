"""An online softmax rescales the sum where it lies in PSUM, and the next matmul adds to it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-INIT"


def kernel(a, b, sick):
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    total = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.nc_matmul(dst=sums, stationary=nl.load(a[0]), moving=nl.load(b[0]))
    if sick:
        nisa.tensor_scalar(dst=sums, data=sums, op0=nl.multiply, operand0=2.0)
    else:
        nisa.tensor_scalar(dst=total, data=sums, op0=nl.multiply, operand0=2.0)
        sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="more")
    nisa.nc_matmul(dst=sums, stationary=nl.load(a[1]), moving=nl.load(b[1]))  # blamed
    if sick:
        nisa.tensor_copy(dst=total, src=sums)
    else:
        nisa.tensor_tensor(dst=total, data1=total, data2=sums, op=nl.add)
    return copied_out(total)


def inputs():
    return ramp(2, 5, 4), ramp(2, 5, 6)


def answer(a, b):
    return 2 * (a[0].T @ b[0]) + a[1].T @ b[1]

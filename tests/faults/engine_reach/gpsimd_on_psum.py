"""GpSimd is to add up a PSUM tile."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-GPSIMD-PSUM"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    total = nl.zeros((4, 6), dtype=nl.float32)
    engine = nisa.engine.gpsimd if sick else nisa.engine.vector
    nisa.tensor_tensor(dst=total, data1=total, data2=sums, op=nl.add, engine=engine)  # blamed
    return copied_out(total)


def inputs():
    return ramp(5, 4), ramp(5, 6)


def answer(a, b):
    return a.T @ b

"""A transpose is appended behind a result, over the end of its bank."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-BANK"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    both = nl.ndarray((64, 1024), dtype=nl.float32, buffer=nl.psum)
    start = 480 if sick else 512
    nisa.nc_matmul(dst=both[:, 0:480], stationary=left, moving=right)
    turned = both[:, start : start + 64]
    nisa.nc_transpose(dst=turned, data=left, engine=nisa.engine.tensor)  # blamed
    result = nl.ndarray((64, 64), dtype=nl.float32)
    nisa.tensor_tensor(dst=result, data1=turned, data2=left, op=nl.add)
    nisa.tensor_tensor(dst=result, data1=both[:, 0:64], data2=result, op=nl.add)
    return copied_out(result)


def inputs():
    return ramp(64, 64), ramp(64, 480)


def answer(a, b):
    return (a.T @ b)[:, 0:64] + a + a.T

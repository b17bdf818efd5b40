"""Two accumulators were given one bank, and the first is read last."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-MEM-CLOBBER"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    place = (0, 0 if sick else 2048)
    first = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum, name="first", address=(0, 0))
    second = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum, name="second", address=place)
    nisa.nc_matmul(dst=first, stationary=left, moving=right)
    nisa.nc_matmul(dst=second, stationary=left, moving=right)
    copied = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=copied, src=second)
    total = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=copied, data2=first, op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return ramp(5, 4), ramp(5, 8)


def answer(a, b):
    return 2 * (a.T @ b)

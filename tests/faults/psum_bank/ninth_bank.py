"""PSUM has eight banks; the address names a ninth."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ADDRESS"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    bank = 8 if sick else 7
    sums = nl.ndarray((4, 512), dtype=nl.float32, buffer=nl.psum, address=(0, bank * 2048))  # blamed
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    result = nl.ndarray((4, 512), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 512)


def answer(a, b):
    return a.T @ b

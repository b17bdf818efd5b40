"""The second number of a PSUM address is a byte, and gets the number of the bank."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ADDRESS"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    result = nl.ndarray((4, 16), dtype=nl.float32)
    for bank in range(2):
        place = bank if sick else bank * 2048
        sums = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum, address=(0, place))  # blamed
        columns = slice(bank * 8, bank * 8 + 8)
        nisa.nc_matmul(dst=sums, stationary=left, moving=right[:, columns])
        nisa.tensor_copy(dst=result[:, columns], src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 16)


def answer(a, b):
    return a.T @ b

"""A PSUM tile of more than 16 KiB per partition."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TILE-SIZE"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    columns = 4097 if sick else 4096
    sums = nl.ndarray((4, columns), dtype=nl.float32, buffer=nl.psum)  # blamed
    nisa.nc_matmul(dst=sums[:, 0:8], stationary=left, moving=right)
    result = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums[:, 0:8])
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(5, 8)


def answer(a, b):
    return a.T @ b

"""double_row exists from gen3 on."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-MATMUL-DOUBLE-ROW"
TARGET = "trn1"


def kernel(a, b, sick):
    left, right = nl.load(a, dtype=nl.float8_e4m3), nl.load(b, dtype=nl.float8_e4m3)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    if sick:
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, perf_mode="double_row")  # blamed
    else:
        for half in range(2):
            nisa.nc_matmul(dst=sums, stationary=left[:, half], moving=right[:, half])
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(8, 2, 4) % 8, ramp(8, 2, 6) % 8


def answer(a, b):
    return np.einsum("kjm,kjn->mn", a, b)

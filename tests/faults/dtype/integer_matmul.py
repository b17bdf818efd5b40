"""The Tensor engine has no integers."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-MATMUL-DTYPE"


def kernel(a, b, sick):
    kind = nl.int32 if sick else nl.float32
    left, right = nl.load(a, dtype=kind), nl.load(b, dtype=kind)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(5, 4, dtype=np.int32), ramp(5, 6, dtype=np.int32)


def answer(a, b):
    return (a.T @ b).astype(np.float32)

"""The sum is copied out in the last iteration but one, before the last block is added."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-UNREAD"


def kernel(a, b, sick):
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    result = nl.ndarray((4, 6), dtype=nl.float32)
    for k in range(3):
        left, right = nl.load(a[k]), nl.load(b[k])
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=k > 0)
        if k == (1 if sick else 2):
            nisa.tensor_copy(dst=result, src=sums)  # blamed
    return copied_out(result)


def inputs():
    return ramp(3, 5, 4), ramp(3, 5, 6)


def answer(a, b):
    return np.einsum("kpm,kpn->mn", a, b)

"""One PSUM tile serves all row blocks with accumulate=None, and goes on adding."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-PSUM-REOPENED"


def kernel(a, b, sick):
    right = nl.load(b)
    out = nl.ndarray((2, 4, 6), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    for m in range(2):
        left = nl.load(a[m])
        fresh = None if sick else False
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=fresh)  # blamed
        result = nl.ndarray((4, 6), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=sums)
        nisa.dma_copy(dst=out[m], src=result)
    return out


def inputs():
    return ramp(2, 5, 4), ramp(5, 6)


def answer(a, b):
    return np.einsum("mki,kj->mij", a, b)

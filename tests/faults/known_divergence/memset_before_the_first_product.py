"""Every row block clears its PSUM tile on the Vector engine before it accumulates."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-PSUM-INIT"
TARGET = "trn1"


def kernel(a, b, sick):
    right = nl.load(b)
    out = nl.ndarray((2, 4, 6), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for m in range(2):
        sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name=f"sums{m}")
        if sick and m == 0:
            nisa.memset(dst=sums, value=0.0)
        nisa.nc_matmul(dst=sums, stationary=nl.load(a[m]), moving=right)  # blamed
        result = nl.ndarray((4, 6), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=sums)
        nisa.dma_copy(dst=out[m], src=result)
    return out


def inputs():
    return ramp(2, 5, 4), ramp(5, 6)


def answer(a, b):
    return np.einsum("mki,kj->mij", a, b)

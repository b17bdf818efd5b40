"""Heads of 200 columns lie side by side in one PSUM tile, and the third crosses into the next bank."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-PSUM-BANK"


def kernel(a, b, sick):
    left = nl.load(a)
    width = 200 if sick else 256
    sums = nl.ndarray((4, 4, width), dtype=nl.float32, buffer=nl.psum)
    result = nl.ndarray((4, 4, 200), dtype=nl.float32)
    for head in range(4):
        columns = sums[:, head, 0:200]
        nisa.nc_matmul(dst=columns, stationary=left, moving=nl.load(b[head]))  # blamed
        nisa.tensor_copy(dst=result[:, head], src=columns)
    return copied_out(result)


def inputs():
    return ramp(5, 4), ramp(4, 5, 200)


def answer(a, b):
    return np.einsum("km,hkn->mhn", a, b)

"""A DMA is to read PSUM."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-BUFFER"


def kernel(a, b, sick):
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    out = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=sums if sick else result)  # blamed
    return out


def inputs():
    return ramp(5, 4), ramp(5, 6)


def answer(a, b):
    return a.T @ b

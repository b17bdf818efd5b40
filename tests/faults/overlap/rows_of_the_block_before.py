"""The last block of a contraction is shorter, and the matmul multiplies the rows that the block before left."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-STALE"


def kernel(a, b, sick):
    left = nl.ndarray((4, 4), dtype=nl.float32, name="left")
    right = nl.ndarray((4, 6), dtype=nl.float32, name="right")
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    for k in range(2):
        rows = min(4, 7 - k * 4)
        for tile, source in ((left, a), (right, b)):
            nisa.dma_copy(dst=tile[0:rows], src=source[k * 4 : k * 4 + rows])
        used = 4 if sick else rows
        nisa.nc_matmul(dst=sums, stationary=left[0:used], moving=right[0:used])  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    return copied_out(result)


def inputs():
    return ramp(7, 4), ramp(7, 6)


def answer(a, b):
    return a.T @ b

"""A ragged tile of 100 rows is reduced as if it had 128."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(x, sick):
    tile = nl.ndarray((128, x.shape[1]), dtype=x.dtype)
    nisa.dma_copy(dst=tile[0:100], src=x)
    rows = 128 if sick else 100
    sums = nl.ndarray((128, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums[0:rows], op=nl.add, data=tile[0:rows], axis=1)  # blamed
    return copied_out(sums[0:100])


def inputs():
    return (ramp(100, 8),)


def answer(x):
    return x.sum(axis=1, keepdims=True)

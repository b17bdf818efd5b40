"""tensor_reduce along the partition dim."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-REDUCE-AXIS"


def kernel(x, sick):
    tile = nl.load(x)
    sums = nl.ndarray((8, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=0 if sick else 1)  # blamed
    return copied_out(sums)


def inputs():
    return (ramp(8, 8),)


def answer(x):
    return x.sum(axis=1, keepdims=True)

"""The destination of a reduction keeps the dim that is reduced."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-REDUCE-COUNT"


def kernel(x, sick):
    tile = nl.load(x)
    sums = nl.ndarray((4, 3, 5) if sick else (4, 3), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=2)  # blamed
    return copied_out(sums)


def inputs():
    return (ramp(4, 3, 5),)


def answer(x):
    return x.sum(axis=2)

"""depends_on gets the tile that the other instruction writes."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ORDER-HANDLE"


def kernel(x, sick):
    tile = nl.load(x)
    first = nl.ndarray((4, 8), dtype=nl.float32)
    second = nl.ndarray((4, 8), dtype=nl.float32)
    before = nisa.tensor_copy(dst=first, src=tile)
    after = nisa.tensor_tensor(dst=second, data1=tile, data2=tile, op=nl.add)
    after.depends_on(first if sick else before)  # blamed
    nisa.tensor_tensor(dst=second, data1=second, data2=first, op=nl.add)
    return copied_out(second)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return 3 * x

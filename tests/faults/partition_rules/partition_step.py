"""An access pattern on chip that takes every second partition."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-AP-PARTITION"


def kernel(x, sick):
    tile = nl.load(x)
    view = tile.ap(pattern=[[16 if sick else 8, 4], [1, 8]])  # blamed
    result = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=view)
    return copied_out(result)


def inputs():
    return (ramp(8, 8),)


def answer(x):
    return x[0:4]

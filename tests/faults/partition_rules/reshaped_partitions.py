"""A reshape on chip joins partitions with the free dim."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PARTITION-FIRST"


def kernel(x, sick):
    tile = nl.load(x)
    view = tile.reshape((2, 16) if sick else (4, 2, 4))  # blamed
    result = nl.ndarray(view.shape, dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=view)
    return copied_out(result)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x.reshape(4, 2, 4)

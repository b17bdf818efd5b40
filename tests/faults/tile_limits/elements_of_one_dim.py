"""A row of 65536 elements in one free dim: an engine counts the elements of a dim with 16 bits."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-DIM-SIZE"


def kernel(x, sick):
    tile = nl.load(x)
    result = nl.ndarray((1, 65536), dtype=nl.uint8)
    dims = (1, 65536) if sick else (1, 2, 32768)
    data, dst = tile.reshape(dims), result.reshape(dims)
    nisa.tensor_scalar(dst=dst, data=data, op0=nl.add, operand0=1.0)  # blamed
    return copied_out(result)


def inputs():
    return (ramp(1, 65536, dtype=np.uint8),)


def answer(x):
    return x + 1

"""A numpy array is handed to an instruction."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-OPERAND"


def kernel(x, sick):
    tile = nl.load(x)
    ones = np.ones((4, 4), np.float32) if sick else nl.ones((4, 4), dtype=nl.float32)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=ones, op=nl.add)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x + 1

"""Two arguments are views of one array: nothing orders the read of the one and the write of the other."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-ORDER"
ORDERS = 4


def kernel(x, y, sick):
    """x goes out, then the last rows of y, which are no rows of x, are cleared; sick: the first ones, which are."""
    out = copied_out(nl.load(x))  # blamed
    zeros = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.sbuf, name="zeros")
    nisa.memset(zeros, value=0)
    nisa.dma_copy(dst=y[0:2] if sick else y[6:8], src=zeros)
    return out, y


def inputs():
    base = ramp(12, 4)
    return base[0:8], base[4:12]


def answer(x, y):
    cleared = np.array(y)
    cleared[6:8] = 0
    return np.array(x), cleared

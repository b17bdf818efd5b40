"""A shift and an addition in one instruction."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-OPERATOR-FAMILY"


def kernel(x, sick):
    tile = nl.load(x)
    second = nl.add if sick else nl.bitwise_or
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.left_shift, operand0=1, op1=second, operand1=1)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 4, dtype=np.int32),)


def answer(x):
    return (x << 1) | 1

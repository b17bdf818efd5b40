"""The distance of a shift is written as 4.0."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-BITVEC-OPERAND"


def kernel(x, sick):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.left_shift, operand0=4.0 if sick else 4)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 8, dtype=np.int32),)


def answer(x):
    return x << 4

"""An operator of one operand is given two."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TENSOR-SCALAR-OPERAND1"


def kernel(x, sick):
    tile = nl.load(x)
    second = 2.0 if sick else None
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0, operand1=second)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x + 1

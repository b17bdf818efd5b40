"""A keyword argument is misspelt."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-CALL"


def kernel(x, sick):
    tile = nl.load(x)
    extra = {"operand": 2.0} if sick else {"operand0": 2.0}
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, **extra)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return 2 * x

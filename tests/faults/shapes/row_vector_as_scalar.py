"""A (1, F) row is given where one value per partition is meant."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-VECTOR-OPERAND"


def kernel(x, column, row, sick):
    tile, good, bad = nl.load(x), nl.load(column), nl.load(row)
    nisa.tensor_scalar(dst=bad, data=bad, op0=nl.add, operand0=0.0)
    factor = bad if sick else good
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)  # blamed
    return copied_out(tile)


def inputs():
    return ramp(4, 4), ramp(4, 1), ramp(1, 4)


def answer(x, column, row):
    return x * column

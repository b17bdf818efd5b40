"""The bias is a parameter that the kernel forgets."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-INPUT-UNUSED"


def kernel(x, bias, sick):  # blamed
    tile = nl.load(x)
    if not sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=nl.load(bias))
    return copied_out(tile)


def inputs():
    return ramp(8, 4), ramp(8, 1)


def answer(x, bias):
    return x + bias

"""A `*` in the signature of a kernel."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI002"


@nki.jit
def sick(x, *, scale=2.0):  # blamed
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=scale)
    return copied_out(tile)


@nki.jit
def kernel(x, scale=2.0):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=scale)
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return 2 * x

"""A kernel is called with a list, which cannot be part of the key under which it is compiled."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI003"


@nki.jit
def sick(x, factors):
    return scaled(x, factors)


def called(x):
    return sick(x, [2.0, 3.0])  # blamed


@nki.jit
def kernel(x, factors=(2.0, 3.0)):
    return scaled(x, factors)


def scaled(x, factors):
    tile = nl.load(x)
    for factor in factors:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    return copied_out(tile)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return 6 * x

"""A factor is drawn while the kernel is specialised, so that it is the same number ever after."""

from __future__ import annotations

import random

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI031"


@nki.jit
def sick(x):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=random.random())  # blamed
    return copied_out(tile)


@nki.jit
def kernel(x, factor=2.0):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    return copied_out(tile)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return 2 * x

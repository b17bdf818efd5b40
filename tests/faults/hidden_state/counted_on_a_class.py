"""A kernel counts its launches on a class, which a compiled kernel does not do again."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI031"


class Launches(nl.NKIObject):
    made = 0


@nki.jit
def sick(x):
    Launches.made = 1  # blamed
    return added(nl.load(x), float(Launches.made))


@nki.jit
def kernel(x, number=1.0):
    return added(nl.load(x), number)


def added(tile, number):
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=number)
    return copied_out(tile)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x + 1

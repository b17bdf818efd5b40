"""A helper hands out numbers and remembers them; it issues no instruction, but the kernel's depend on what it knows."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI031"

_numbers = {}


def number_of(name):
    return _numbers.setdefault(name, float(len(name)))  # blamed


@nki.jit
def sick(x):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=number_of("bias"))
    return copied_out(tile)


def length_of(name):
    return float(len(name))


@nki.jit
def kernel(x):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=length_of("bias"))
    return copied_out(tile)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x + 4

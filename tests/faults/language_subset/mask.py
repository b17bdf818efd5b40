"""An instruction with a mask, as in Beta 1."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKI021"


@nki.jit
def sick(x):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0, mask=None)  # blamed
    return copied_out(tile)


@nki.jit
def kernel(x):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile[:, 0:2], data=tile[:, 0:2], op0=nl.add, operand0=1.0)
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x + (np.arange(4) < 2)

"""What an instruction returns is used as a tile."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI022"


@nki.jit
def sick(x):
    tile = nl.load(x)
    moved = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    nisa.tensor_tensor(dst=tile, data1=moved, data2=tile, op=nl.add)  # blamed
    return copied_out(tile)


@nki.jit
def kernel(x):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return 2 * (x + 1)

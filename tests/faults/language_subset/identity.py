"""`is` between dtypes."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI001"


@nki.jit
def sick(x):
    tile = nl.load(x)
    if x.dtype is nl.float32:  # blamed
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
    return copied_out(tile)


@nki.jit
def kernel(x):
    tile = nl.load(x)
    if x.dtype == nl.float32:
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x + x

"""A tile is read that no line before has written, seen in the source."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKI040"


@nki.jit
def sick(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    total = nl.ndarray((4, 8), dtype=nl.float32)
    tile = nl.load(x)
    nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)  # blamed
    nisa.dma_copy(dst=out, src=total)
    return out


@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    total = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.memset(dst=total, value=0.0)
    tile = nl.load(x)
    nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    nisa.dma_copy(dst=out, src=total)
    return out


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x

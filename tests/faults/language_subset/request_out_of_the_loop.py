"""An instruction before a device loop is to wait for one in the body, seen in the source."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKI041"


@nki.jit
def sick(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.load(x)
    before = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)

    def body(i):
        added = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        before.depends_on(added)  # blamed

    nl.fori_loop(0, 2, body)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.load(x)
    before = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)

    def body(i):
        added = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        added.depends_on(before)

    nl.fori_loop(0, 2, body)
    nisa.dma_copy(dst=out, src=tile)
    return out


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x + 3

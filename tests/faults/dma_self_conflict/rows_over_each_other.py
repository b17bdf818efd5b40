"""A store whose pattern steps by 0 puts every row of a tile on the first one of the output."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-SCATTER-TWICE"


def kernel(x, sick):
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    whole = nl.load(x)
    nisa.dma_copy(dst=out, src=whole)
    nisa.tensor_scalar(dst=whole, data=whole, op0=nl.multiply, operand0=2.0)
    step = 0 if sick else columns
    nisa.dma_copy(dst=out.ap(pattern=[[step, rows], [1, columns]]), src=whole)  # blamed
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return 2 * x

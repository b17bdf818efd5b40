"""A tile that the body of a device loop made is kept in Python and stored after the loop."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-LOOP-TILE"


def kernel(x, sick):
    blocks, rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    outside = nl.ndarray((rows, columns), dtype=x.dtype)
    last = {"tile": outside}

    def body(i):
        tile = nl.ndarray((rows, columns), dtype=x.dtype) if sick else outside
        block = x.ap(pattern=[[columns, rows], [1, columns]], scalar_offset=i, indirect_dim=0)
        nisa.dma_copy(dst=tile, src=block)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        last["tile"] = tile

    nl.fori_loop(0, blocks, body)
    nisa.dma_copy(dst=out, src=last["tile"])  # blamed
    return out


def inputs():
    return (ramp(24, 4).reshape(3, 8, 4),)


def answer(x):
    return x[-1] + 1

"""The counter of a device loop is multiplied in Python, which registers have only since 0.7."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKI013"


@nki.jit
def sick(x):
    blocks, rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    all_rows, all_out = x.reshape((blocks * rows, columns)), out.reshape((blocks * rows, columns))

    def body(i):
        first = i * rows  # blamed
        pattern = [[columns, rows], [1, columns]]
        tile = nl.ndarray((rows, columns), dtype=x.dtype)
        nisa.dma_copy(dst=tile, src=all_rows.ap(pattern=pattern, scalar_offset=first, indirect_dim=0))
        nisa.dma_copy(dst=all_out.ap(pattern=pattern, scalar_offset=first, indirect_dim=0), src=tile)

    nl.fori_loop(0, blocks, body)
    return out


@nki.jit
def kernel(x):
    blocks, rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)

    def body(i):
        pattern = [[columns, rows], [1, columns]]
        tile = nl.ndarray((rows, columns), dtype=x.dtype)
        nisa.dma_copy(dst=tile, src=x.ap(pattern=pattern, scalar_offset=i, indirect_dim=0))
        nisa.dma_copy(dst=out.ap(pattern=pattern, scalar_offset=i, indirect_dim=0), src=tile)

    nl.fori_loop(0, blocks, body)
    return out


def inputs():
    return (ramp(24, 4).reshape(3, 8, 4),)


def answer(x):
    return x

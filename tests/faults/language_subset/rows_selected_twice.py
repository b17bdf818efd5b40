"""Rows are gathered by an index tile, and the gathered dim is sliced, seen in the source."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKI038"


@nki.jit
def sick(x, ids):
    out = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    rows = nl.load(ids)
    gathered = x.vector_select(0, rows)
    tile = nl.load(gathered[0:2])  # blamed
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def kernel(x, ids):
    out = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    rows = nl.load(ids)
    tile = nl.load(x.vector_select(0, rows[0:2]))
    nisa.dma_copy(dst=out, src=tile)
    return out


def inputs():
    return ramp(8, 4), np.array([[5], [2], [1], [0]], np.int32)


def answer(x, ids):
    return x[[5, 2]]

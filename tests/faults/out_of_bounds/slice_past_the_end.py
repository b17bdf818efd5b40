"""The last tile of a loop that ignores the ragged rest."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-INDEX"


def kernel(x, sick):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for start in range(0, 10, 4):
        end = start + 4 if sick else min(start + 4, 10)
        tile = nl.load(x[start:end])  # blamed
        nisa.dma_copy(dst=out[start:end], src=tile)
    return out


def inputs():
    return (ramp(10, 3),)


def answer(x):
    return x

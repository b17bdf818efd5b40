"""The last block of rows is never stored."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-OUTPUT-PARTIAL"


def kernel(x, sick):
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")  # blamed
    for block in range(1 if sick else 2):
        rows = nl.ds(block * 4, 4)
        nisa.dma_copy(dst=out[rows], src=nl.load(x[rows]))
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

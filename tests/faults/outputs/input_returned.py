"""The kernel returns its input instead of the result."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-OUTPUT-INPUT"


def kernel(x, sick):  # blamed
    tile = nl.load(x)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.private_hbm if sick else nl.shared_hbm)
    nisa.dma_copy(dst=out, src=nl.add(tile, tile))
    return x if sick else out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x + x

"""A tile from outside is loaded in every iteration of a loop that declares its iterations independent."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-AFFINE-CARRIED"


def kernel(x, sick):
    out = nl.ndarray((3, 4, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    outside = nl.ndarray((4, 8), dtype=nl.float32, name="outside")
    nisa.memset(dst=outside, value=1.0)
    for block in nl.affine_range(3):
        tile = outside if sick else nl.ndarray((4, 8), dtype=nl.float32)
        nisa.dma_copy(dst=tile, src=x[block])  # blamed
        nisa.dma_copy(dst=out[block], src=tile)
    return out


def inputs():
    return (ramp(3, 4, 8),)


def answer(x):
    return x

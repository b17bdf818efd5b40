"""A result is stored after its bytes were taken for the next block."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-MEM-CLOBBER"


def kernel(x, sick):
    out = nl.ndarray((2, 8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    one = nl.ndarray((8, 4), dtype=nl.float32, name="one", address=(0, 0))
    two = nl.ndarray((8, 4), dtype=nl.float32, name="two", address=(0, 0))
    nisa.dma_copy(dst=one, src=x[0])
    if not sick:
        nisa.dma_copy(dst=out[0], src=one)
    nisa.dma_copy(dst=two, src=x[1])
    if sick:
        nisa.dma_copy(dst=out[0], src=one)  # blamed
    nisa.dma_copy(dst=out[1], src=two)
    return out


def inputs():
    return (ramp(2, 8, 4),)


def answer(x):
    return x

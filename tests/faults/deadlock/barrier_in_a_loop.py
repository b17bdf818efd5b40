"""Core 1 makes one iteration less, and a barrier stands in the loop."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-DEADLOCK"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    blocks = 2 - core if sick else 2
    for block in range(blocks):
        rows = nl.ds(core * 4 + block * 2, 2)
        nisa.dma_copy(dst=out[rows], src=nl.load(x[rows]))
        nisa.core_barrier(data=out, cores=(0, 1))  # blamed
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

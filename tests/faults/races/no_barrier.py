"""Core 0 reads what core 1 writes later in this run, and at any time on the chip."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-RACE"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    scratch = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    if core == 0:
        nisa.dma_copy(dst=scratch, src=nl.load(x))
    if not sick:
        nisa.core_barrier(data=scratch, cores=(0, 1))
    mine = nl.load(scratch[core * 4 : core * 4 + 4])  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=mine)
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

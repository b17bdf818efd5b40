"""Scratch space is filled again for a second round without waiting for the readers of the first."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-RACE"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    scratch = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((2, 4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for turn in range(2):
        if core == 0:
            nisa.dma_copy(dst=scratch, src=nl.load(x[turn]))
        nisa.core_barrier(data=scratch, cores=(0, 1))
        if core == 1:
            nisa.dma_copy(dst=out[turn], src=nl.load(scratch))  # blamed
        if not sick:
            nisa.core_barrier(data=scratch, cores=(0, 1))
    return out


def inputs():
    return (ramp(2, 4, 4),)


def answer(x):
    return x

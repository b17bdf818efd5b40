"""Core 1 returns early, before the second of two barriers."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-DEADLOCK"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    nisa.core_barrier(data=out, cores=(0, 1))
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=nl.load(x[core * 4 : core * 4 + 4]))
    if sick and core == 1:
        return out
    nisa.core_barrier(data=out, cores=(0, 1))  # blamed
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

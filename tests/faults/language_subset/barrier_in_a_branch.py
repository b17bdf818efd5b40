"""A barrier that core 1 never reaches, seen in the source."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKI035"
CORES = 2


@nki.jit
def sick(x):
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[core : core + 1], src=nl.load(x[core : core + 1]))
    if core == 0:
        nisa.core_barrier(data=out, cores=(0, 1))  # blamed
    return out


@nki.jit
def kernel(x):
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[core : core + 1], src=nl.load(x[core : core + 1]))
    nisa.core_barrier(data=out, cores=(0, 1))
    return out


def inputs():
    return (ramp(2, 4),)


def answer(x):
    return x

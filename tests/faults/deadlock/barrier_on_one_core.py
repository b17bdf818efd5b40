"""Only core 0 reaches the barrier."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-DEADLOCK"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    rows = nl.ds(core * 4, 4)
    nisa.dma_copy(dst=out[rows], src=nl.load(x[rows]))
    if core == 0 or not sick:
        nisa.core_barrier(data=out, cores=(0, 1))  # blamed
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

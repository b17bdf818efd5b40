"""Core 0 reads the half that core 1 has yet to write."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-UNWRITTEN"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    scratch = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=scratch[core * 4 : core * 4 + 4], src=nl.load(x[core * 4 : core * 4 + 4]))
    if not sick:
        nisa.core_barrier(data=scratch, cores=(0, 1))
    theirs = nl.load(scratch[4 - core * 4 : 8 - core * 4])  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=theirs)
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return np.concatenate([x[4:], x[:4]])

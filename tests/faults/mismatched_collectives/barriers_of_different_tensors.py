"""The cores wait for each other with different tensors."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-RENDEZVOUS"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    scratch = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=scratch[core : core + 1], src=nl.load(x[core : core + 1]))
    named = out if sick and core == 1 else scratch
    nisa.core_barrier(data=named, cores=(0, 1))  # blamed
    nisa.dma_copy(dst=out[core : core + 1], src=nl.load(scratch[1 - core : 2 - core]))
    return out


def inputs():
    return (ramp(2, 4),)


def answer(x):
    return x[::-1]

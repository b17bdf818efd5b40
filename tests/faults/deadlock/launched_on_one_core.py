"""A kernel with a barrier for two cores is launched on one."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-DEADLOCK"


def kernel(x, sick):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out, src=nl.load(x))
    if sick or nl.num_programs(0) == 2:
        nisa.core_barrier(data=out, cores=(0, 1))  # blamed
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

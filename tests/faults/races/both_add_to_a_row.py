"""Both cores add their part of a sum to one row in HBM, and one addition is lost."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-RACE"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    rows = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="rows")
    if core == 0:
        nisa.dma_copy(dst=rows, src=nl.zeros((2, 4), dtype=nl.float32))
    nisa.core_barrier(data=rows, cores=(0, 1))
    mine = nl.load(x[core : core + 1])
    row = rows[0:1] if sick else rows[core : core + 1]
    nisa.dma_compute(dst=row, srcs=[row, mine], reduce_op=nl.add)  # blamed
    return rows


def inputs():
    return (ramp(2, 4),)


def answer(x):
    return x

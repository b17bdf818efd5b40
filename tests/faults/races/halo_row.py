"""A stencil in place: each core reads the row of its neighbour that the neighbour is about to overwrite."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-RACE"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    grid = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="grid")
    fresh = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="fresh")
    nisa.dma_copy(dst=grid[core * 4 : core * 4 + 4], src=nl.load(x[core * 4 : core * 4 + 4]))
    nisa.core_barrier(data=grid, cores=(0, 1))
    total = nl.load(grid[core * 4 : core * 4 + 4])
    beside = nl.load(grid[4 - core : 8 - core])  # blamed
    nisa.tensor_tensor(dst=total, data1=total, data2=beside, op=nl.add)
    result = grid if sick else fresh
    nisa.dma_copy(dst=result[core * 4 : core * 4 + 4], src=total)
    return result


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return np.concatenate([x[0:4] + x[4:8], x[4:8] + x[3:7]])

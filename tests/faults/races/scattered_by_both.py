"""Both cores scatter tokens to rows of one table, and one row number occurs on both."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-RACE"
CORES = 2


def kernel(x, ids, sick):
    core = nl.program_id(0)
    table = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="table")
    if core == 0:
        nisa.dma_copy(dst=table, src=nl.zeros((8, 4), dtype=nl.float32))
    nisa.core_barrier(data=table, cores=(0, 1))
    numbers = nl.load(ids[0 if sick else 1, core])
    rows = table.ap(pattern=[[4, 3], [1, 4]], vector_offset=numbers, indirect_dim=0)
    nisa.dma_copy(dst=rows, src=nl.load(x[core]))  # blamed
    return table


def inputs():
    shared = [[[0], [1], [2]], [[2], [4], [5]]]
    distinct = [[[0], [1], [2]], [[3], [4], [5]]]
    return ramp(2, 3, 4), np.array([shared, distinct], np.int32)


def answer(x, ids):
    return np.concatenate([x.reshape(6, 4), np.zeros((2, 4), np.float32)])

"""Each core takes the rows that are next in a Python list: which core comes first is chance."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-CORE-SCHEDULE"
CORES = 2
SEEDS = 8

TAKEN = []


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    block = len(TAKEN) % 2 if sick else core
    TAKEN.append(core)
    rows = nl.ds(block * 4, 4)
    mine = nl.load(x[core * 4 : core * 4 + 4])
    nisa.dma_copy(dst=out[rows], src=mine)  # blamed
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

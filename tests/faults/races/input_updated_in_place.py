"""Core 1 updates rows of an input that core 0 still reads."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-RACE"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    rows = nl.ds(core * 4, 4)
    mine = nl.load(x[rows])
    seen = nl.load(x[4:8] if sick and core == 0 else x[rows])  # blamed
    nisa.tensor_tensor(dst=mine, data1=mine, data2=seen, op=nl.add)
    if core == 1:
        nisa.dma_copy(dst=x[rows], src=mine)
    nisa.dma_copy(dst=out[rows], src=mine)
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x + x

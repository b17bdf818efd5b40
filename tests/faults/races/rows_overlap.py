"""The cores write five rows each of eight."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-RACE"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    rows = nl.ds(core * 3, 5) if sick else nl.ds(core * 4, 4)
    mine = nl.load(x[rows])
    if core == 1:
        nisa.tensor_scalar(dst=mine, data=mine, op0=nl.add, operand0=1.0)
    nisa.dma_copy(dst=out[rows], src=mine)  # blamed
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x + (np.arange(8)[:, None] >= 4)

"""Even columns for one core, odd ones for the other, but both begin at column 0."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-RACE"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    if sick and core == 0:
        nisa.dma_copy(dst=out[:, 1:8:2], src=nl.load(x[:, 1:8:2]))
    columns = slice(0 if sick else core, 8, 2)
    mine = nl.load(x[:, columns])
    nisa.tensor_scalar(dst=mine, data=mine, op0=nl.add, operand0=float(core))
    nisa.dma_copy(dst=out[:, columns], src=mine)  # blamed
    return out


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x + (np.arange(8) % 2).astype(np.float32)

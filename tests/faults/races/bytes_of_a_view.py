"""One core writes float32 columns, the other bytes of the same rows; the byte columns are counted in floats."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-RACE"
CORES = 2


def kernel(x, flags, sick):
    core = nl.program_id(0)
    packed = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="packed")
    if core == 0:
        nisa.dma_copy(dst=packed[:, 0:4], src=nl.load(x))
    else:
        first = 4 if sick else 16
        nisa.dma_copy(dst=packed.view(nl.uint8)[:, first : first + 16], src=nl.load(flags))  # blamed
        if sick:
            nisa.dma_copy(dst=packed[:, 4:8], src=nl.load(x))
    return packed


def inputs():
    return ramp(8, 4), ramp(8, 16, dtype=np.uint8)


def answer(x, flags):
    return np.concatenate([x, flags.view(np.float32)], axis=1)

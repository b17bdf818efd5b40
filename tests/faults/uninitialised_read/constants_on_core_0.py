"""Core 0 loads the constants for both cores, but each core has an SBUF of its own."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-UNWRITTEN"
CORES = 2


def kernel(x, factors, sick):
    core = nl.program_id(0)
    scale = nl.ndarray((4, 1), dtype=nl.float32, name="scale")
    if core == 0 or not sick:
        nisa.dma_copy(dst=scale, src=factors)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    tile = nl.load(x[core * 4 : core * 4 + 4])
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=scale)  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=tile)
    return out


def inputs():
    return ramp(8, 4), ramp(4, 1) + 1


def answer(x, factors):
    return x * np.concatenate([factors, factors])

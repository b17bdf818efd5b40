"""Both cores compute everything; the launch on two cores gains nothing."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-RACE"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    rows = nl.ds(0, 8) if sick else nl.ds(core * 4, 4)
    nisa.dma_copy(dst=out[rows], src=nl.load(x[rows]))  # blamed
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

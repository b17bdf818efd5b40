"""The kernel multiplies by the number of times it was run: a launch made again gives something else."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-NOT-REPEATABLE"
CORES = 2
SEEDS = 1

RUNS = []


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    RUNS.append(core)
    rows = nl.ds(core * 4, 4)
    mine = nl.load(x[rows])
    if sick:
        nisa.tensor_scalar(dst=mine, data=mine, op0=nl.multiply, operand0=float(len(RUNS)))
    nisa.dma_copy(dst=out[rows], src=mine)  # blamed
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

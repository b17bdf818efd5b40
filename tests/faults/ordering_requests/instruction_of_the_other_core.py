"""A store on core 1 is to wait for an instruction of core 0."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-ORDER-CORE"
CORES = 2

first_of_cores = {}


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray((4, 4), dtype=nl.float32)
    first_of_cores[core] = nisa.dma_copy(dst=tile, src=x[core * 4 : core * 4 + 4])
    nisa.core_barrier(data=out, cores=(0, 1))
    doubled = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    doubled.depends_on(first_of_cores[1 - core if sick else core])  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=tile)
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return 2 * x

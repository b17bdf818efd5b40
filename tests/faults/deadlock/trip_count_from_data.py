"""Each core takes the trip count of its device loop from its own lengths, and a barrier stands in the loop."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-DEADLOCK"
CORES = 2


def kernel(x, lengths, sick):
    core = nl.program_id(0)
    out = nl.ndarray((2, 4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    count = nisa.register_alloc()
    nisa.register_load(dst=count, src=lengths[0:1, core : core + 1] if sick else lengths[0:1, 0:1])
    total = nl.load(x[core])

    def body(i):
        nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=1.0)
        nisa.core_barrier(data=out, cores=(0, 1))  # blamed

    nl.fori_loop(0, count, body)
    nisa.dma_copy(dst=out[core], src=total)
    return out


def inputs():
    return ramp(2, 4, 4), np.array([[3, 2]], np.int32)


def answer(x, lengths):
    return x + 3

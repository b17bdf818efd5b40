"""The cores exchange on different pipes."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-DEADLOCK"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    mine = nl.load(x[core * 4 : core * 4 + 4])
    other = nl.ndarray((4, 4), dtype=x.dtype)
    pipe = core if sick else 0
    nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=pipe)  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=other)
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return np.concatenate([x[4:], x[:4]])

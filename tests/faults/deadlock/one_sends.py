"""Core 1 thinks that receiving needs no call."""

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
    other = nl.zeros((4, 4), dtype=x.dtype)
    peer = 1 - core
    if core == 0 or not sick:
        nisa.sendrecv(src=mine, dst=other, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=other)
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return np.concatenate([x[4:], x[:4]])

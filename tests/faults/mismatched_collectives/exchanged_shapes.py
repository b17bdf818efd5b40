"""The cores of a sendrecv bring tiles of different sizes."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-RENDEZVOUS"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    out = nl.ndarray((2, 4, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    rows = 2 if sick and core == 1 else 4
    mine, other, peer = nl.load(x[core, 0:rows]), nl.ndarray((rows, 4), dtype=x.dtype), 1 - core
    nisa.sendrecv(src=mine, dst=other, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)  # blamed
    nisa.dma_copy(dst=out[core, 0:rows], src=other)
    return out


def inputs():
    return (ramp(2, 4, 4),)


def answer(x):
    return x[::-1]

"""A row of 300 float32 is sent to the other core by GpSimd's DMA, which takes 1 KiB."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-SENDRECV-GPSIMD-BYTES"
CORES = 2


def kernel(x, sick):
    core = nl.program_id(0)
    mine = nl.load(x[core * 4 : core * 4 + 4])
    other = nl.ndarray((4, 300), dtype=nl.float32)
    carrier = nisa.dma_engine.gpsimd_dma if sick else nisa.dma_engine.dma
    pair = {"send_to_rank": 1 - core, "recv_from_rank": 1 - core, "pipe_id": 0}
    nisa.sendrecv(dst=other, src=mine, dma_engine=carrier, **pair)  # blamed
    out = nl.ndarray((8, 300), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=other)
    return out


def inputs():
    return (ramp(8, 300),)


def answer(x):
    return np.concatenate([x[4:], x[:4]])

"""Each core sums its half of the contraction, and accumulate=(k > 0) never starts on core 1."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-PSUM-UNSTARTED"
CORES = 2


def kernel(a, b, sick):
    core = nl.program_id(0)
    out = nl.ndarray((2, 4, 6), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    for k in range(core * 2, core * 2 + 2):
        left, right = nl.load(a[k]), nl.load(b[k])
        goes_on = k > 0 if sick else k > core * 2
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=goes_on)  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)
    nisa.dma_copy(dst=out[core], src=result)
    return out


def inputs():
    return ramp(4, 5, 4), ramp(4, 5, 6)


def answer(a, b):
    return np.einsum("ckpm,ckpn->cmn", a.reshape(2, 2, 5, 4), b.reshape(2, 2, 5, 6))

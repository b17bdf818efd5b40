"""The tiles share bytes in partitions 32 to 63 only."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-MEM-CLOBBER"


def kernel(x, y, sick):
    low = nl.ndarray((64, 4), dtype=nl.float32, name="low", address=(0, 0))
    high = nl.ndarray((32, 4), dtype=nl.float32, name="high", address=(32 if sick else 64, 0))
    nisa.dma_copy(dst=low, src=x)
    nisa.dma_copy(dst=high, src=y)
    sums = nl.ndarray((64, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=low, axis=1)  # blamed
    out = nl.ndarray((96, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out[0:64, 0:1], src=sums)
    nisa.dma_copy(dst=out[0:64, 1:4], src=x[:, 1:4])
    nisa.dma_copy(dst=out[64:96], src=high)
    return out


def inputs():
    return ramp(64, 4), ramp(32, 4)


def answer(x, y):
    return np.concatenate([np.concatenate([x.sum(axis=1, keepdims=True), x[:, 1:]], axis=1), y])

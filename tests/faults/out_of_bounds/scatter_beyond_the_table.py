"""New rows are scattered to a cache that is full."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-OOB"


def kernel(x, places, sick):
    cache = nl.ndarray((4, 3), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=cache, src=nl.zeros((4, 3), dtype=nl.float32))
    index = nl.load(places)
    if sick:
        nisa.tensor_scalar(dst=index, data=index, op0=nl.add, operand0=2)
    nisa.dma_copy(dst=cache.vector_select(0, index), src=nl.load(x))  # blamed
    return cache


def inputs():
    return ramp(2, 3) + 1, np.array([[3], [1]], np.int32)


def answer(x, places):
    cache = np.zeros((4, 3), np.float32)
    cache[places[:, 0]] = x
    return cache

"""A cache is shifted by one row with one DMA."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-DMA-OVERLAP"


def kernel(x, sick):
    cache = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="cache")
    nisa.dma_copy(dst=cache, src=nl.load(x))
    if sick:
        nisa.dma_copy(dst=cache[0:7], src=cache[1:8])  # blamed
    else:
        rows = nl.load(cache[1:8])
        nisa.dma_copy(dst=cache[0:7], src=rows)
    return cache


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return np.concatenate([x[1:], x[7:]])

"""The eight largest of six expert scores."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-SEARCH-SIZE"


def kernel(x, sick):
    scores = nl.zeros((4, 8), dtype=nl.float32)
    nisa.memset(dst=scores, value=-1.0)
    nisa.dma_copy(dst=scores[:, 0:6], src=x)
    best = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.max8(dst=best, src=scores[:, 0:6] if sick else scores)  # blamed
    return copied_out(best[:, 0:2])


def inputs():
    return (ramp(4, 6),)


def answer(x):
    return -np.sort(-x, axis=1)[:, 0:2]

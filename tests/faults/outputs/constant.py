"""The tile of zeros is stored instead of the sum that began with it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-OUTPUT-CONSTANT"


def kernel(x, sick):
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")  # blamed
    start = nl.zeros((8, 4), dtype=nl.float32)
    total = nl.ndarray((8, 4), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=start, data2=nl.load(x), op=nl.add)
    nisa.dma_copy(dst=out, src=start if sick else total)
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

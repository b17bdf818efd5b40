"""nl.zeros in HBM: no engine fills HBM, a DMA does."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-FILL"


def kernel(x, sick):
    buffer = nl.shared_hbm if sick else nl.sbuf
    start = nl.zeros((4, 4), dtype=nl.float32, buffer=buffer)  # blamed
    nisa.tensor_tensor(dst=start, data1=start, data2=nl.load(x), op=nl.add)
    return copied_out(start)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x

"""dma_compute adds two rows to one, against the promise of unique row numbers."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp

CODE = "NKW-SCATTER-TWICE"


def kernel(x, table, places, sick):
    sums = nl.ndarray((4, 3), dtype=nl.float32, buffer=nl.shared_hbm, name="sums")
    nisa.dma_copy(dst=sums, src=nl.load(table))
    index = nl.load(places)
    if sick:
        nisa.tensor_scalar(dst=index, data=index, op0=nl.minimum, operand0=1)
    rows = sums.vector_select(0, index)
    nisa.dma_compute(dst=rows, srcs=[rows, nl.load(x)], reduce_op=nl.add)  # blamed
    return sums


def inputs():
    return ramp(3, 3) + 1, ramp(4, 3), np.array([[3], [1], [0]], np.int32)


def answer(x, table, places):
    sums = table.copy()
    sums[places[:, 0]] += x
    return sums

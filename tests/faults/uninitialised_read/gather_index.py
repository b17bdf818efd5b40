"""The row numbers of a gather are read before they were loaded."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(table, ids, sick):
    index = nl.ndarray((4, 1), dtype=nl.int32)
    if not sick:
        nisa.dma_copy(dst=index, src=ids)
    rows = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.dma_copy(dst=rows, src=table.vector_select(0, index))  # blamed
    return copied_out(rows)


def inputs():
    return ramp(10, 8), np.array([[3], [9], [0], [3]], np.int32)


def answer(table, ids):
    return table[ids[:, 0]]

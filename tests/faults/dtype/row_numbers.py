"""Row numbers of a gather are float32."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-INDEX-TILE"


def kernel(table, ids, sick):
    index = nl.load(ids, dtype=nl.float32 if sick else nl.int32)
    rows = nl.ndarray((3, 4), dtype=nl.float32)
    nisa.dma_copy(dst=rows, src=table.vector_select(0, index))  # blamed
    return copied_out(rows)


def inputs():
    return ramp(6, 4), np.array([[5], [0], [1]], np.int32)


def answer(table, ids):
    return table[ids[:, 0]]

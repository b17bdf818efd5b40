"""A padding id of -1 is gathered like any other."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-OOB"


def kernel(table, ids, sick):
    index = nl.load(ids)
    rows = nl.zeros((3, 4), dtype=nl.float32)
    mode = nisa.oob_mode.error if sick else nisa.oob_mode.skip
    nisa.dma_copy(dst=rows, src=table.vector_select(0, index), oob_mode=mode)  # blamed
    return copied_out(rows)


def inputs():
    return ramp(6, 4), np.array([[5], [-1], [1]], np.int32)


def answer(table, ids):
    return np.where(ids >= 0, table[ids[:, 0]], 0)

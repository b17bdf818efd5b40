"""A row number names a row that the table does not have."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-OOB"


def kernel(table, ids, sick):
    index = nl.load(ids)
    if not sick:
        nisa.tensor_scalar(dst=index, data=index, op0=nl.minimum, operand0=5)
    rows = nl.ndarray((3, 4), dtype=nl.float32)
    nisa.dma_copy(dst=rows, src=table.vector_select(0, index))  # blamed
    return copied_out(rows)


def inputs():
    return ramp(6, 4), np.array([[5], [6], [1]], np.int32)


def answer(table, ids):
    return table[np.minimum(ids[:, 0], 5)]

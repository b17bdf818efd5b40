"""A gather that skips padding ids leaves their rows as they were, and they were never set."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(table, ids, sick):
    rows = nl.load(ids)
    gathered = nl.ndarray((4, 6), dtype=nl.float32)
    if not sick:
        nisa.memset(dst=gathered, value=0.0)
    chosen = table.ap(pattern=[[6, 4], [1, 6]], vector_offset=rows, indirect_dim=0)
    nisa.dma_copy(dst=gathered, src=chosen, oob_mode=nisa.oob_mode.skip)
    doubled = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_tensor(dst=doubled, data1=gathered, data2=gathered, op=nl.add)  # blamed
    return copied_out(doubled)


def inputs():
    return ramp(8, 6), np.array([[3], [0], [99], [7]], np.int32)


def answer(table, ids):
    return 2 * np.concatenate([table[[3, 0]], np.zeros((1, 6), np.float32), table[[7]]])

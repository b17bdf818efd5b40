"""The operands of an addition have 8 and 4 partitions."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PARTITIONS-AGREE"


def kernel(x, y, sick):
    left, right = nl.load(x), nl.load(y)
    total = nl.ndarray((8, 4), dtype=nl.float32)
    if not sick:
        nisa.dma_copy(dst=total, src=y)
    other = right[0:4] if sick else total
    nisa.tensor_tensor(dst=total, data1=left, data2=other, op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return ramp(8, 4), ramp(8, 4)


def answer(x, y):
    return x + y

"""The second tile begins on the last element of the first."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-MEM-CLOBBER"


def kernel(x, y, sick):
    a = nl.ndarray((8, 16), dtype=nl.float32, name="a", address=(0, 0))
    b = nl.ndarray((8, 16), dtype=nl.float32, name="b", address=(0, 60 if sick else 64))
    nisa.dma_copy(dst=a, src=x)
    nisa.dma_copy(dst=b, src=y)
    total = nl.ndarray((8, 16), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=a, data2=b, op=nl.subtract)  # blamed
    return copied_out(total)


def inputs():
    return ramp(8, 16), ramp(8, 16) + 2


def answer(x, y):
    return x - y

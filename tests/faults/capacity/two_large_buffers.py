"""Double buffering of a tile that takes more than half of SBUF."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-CAPACITY"


def kernel(x, sick):
    total = nl.zeros((1, 4), dtype=nl.float32)
    buffers = [nl.ndarray((1, 30000), dtype=nl.float32) for _ in range(2 if sick else 1)]  # blamed
    for i in range(3):
        tile = buffers[i % len(buffers)]
        nisa.dma_copy(dst=tile, src=x[i : i + 1])
        nisa.tensor_tensor(dst=total, data1=total, data2=tile[:, 0:4], op=nl.add)
    return copied_out(total)


def inputs():
    return (ramp(3, 30000),)


def answer(x):
    return x[:, 0:4].sum(axis=0, keepdims=True)

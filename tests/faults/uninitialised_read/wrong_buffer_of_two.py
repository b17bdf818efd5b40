"""Double buffering computes on the buffer that is loaded next."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(x, sick):
    buffers = [nl.ndarray((8, 4), dtype=nl.float32), nl.ndarray((8, 4), dtype=nl.float32)]
    total = nl.zeros((8, 4), dtype=nl.float32)
    for i in range(4):
        nisa.dma_copy(dst=buffers[i % 2], src=x[:, i * 4 : i * 4 + 4])
        used = buffers[(i + 1) % 2] if sick else buffers[i % 2]
        nisa.tensor_tensor(dst=total, data1=total, data2=used, op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return (ramp(8, 16),)


def answer(x):
    return x.reshape(8, 4, 4).sum(axis=1)

"""The rotation of two buffers stands still: every block is loaded over the one before, which nobody used."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNREAD"


def kernel(x, sick):
    buffers = [nl.ndarray((8, 4), dtype=nl.float32, name=f"buffer{i}") for i in range(2)]
    total = nl.zeros((8, 4), dtype=nl.float32)
    nisa.dma_copy(dst=buffers[0], src=x[:, 0:4])
    for i in range(3):
        following = buffers[1] if sick else buffers[(i + 1) % 2]
        if i < 2:
            nisa.dma_copy(dst=following, src=x[:, i * 4 + 4 : i * 4 + 8])  # blamed
        used = buffers[0] if sick else buffers[i % 2]
        nisa.tensor_tensor(dst=total, data1=total, data2=used, op=nl.add)
    return copied_out(total)


def inputs():
    return (ramp(8, 12),)


def answer(x):
    return x.reshape(8, 3, 4).sum(axis=1)

"""The trip count of a device loop comes from the host and counts the padding block."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-OOB"


def kernel(x, blocks, sick):
    count = nisa.register_alloc()
    nisa.register_load(dst=count, src=blocks[0:1, 0:1] if sick else blocks[0:1, 1:2])
    total = nl.zeros((1, 4), dtype=nl.float32)

    def body(i):
        tile = nl.ndarray((1, 4), dtype=nl.float32)
        block = x.ap(pattern=[[4, 1], [1, 4]], scalar_offset=i, indirect_dim=0)
        nisa.dma_copy(dst=tile, src=block)  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    nl.fori_loop(0, count, body)
    return copied_out(total)


def inputs():
    return ramp(3, 4), np.array([[4, 3]], np.int32)


def answer(x, blocks):
    return x.sum(axis=0, keepdims=True)

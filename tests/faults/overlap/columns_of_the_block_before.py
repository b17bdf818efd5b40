"""The last block of a row sum is shorter, and the reduction takes the columns that the block before left."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-STALE"


def kernel(x, sick):
    tile = nl.ndarray((4, 8), dtype=nl.float32, name="tile")
    total = nl.zeros((4, 1), dtype=nl.float32)
    for block in range(2):
        columns = min(8, 13 - block * 8)
        nisa.dma_copy(dst=tile[:, 0:columns], src=x[:, block * 8 : block * 8 + columns])
        part = nl.ndarray((4, 1), dtype=nl.float32)
        used = 8 if sick else columns
        nisa.tensor_reduce(dst=part, op=nl.add, data=tile[:, 0:used], axis=1)  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=part, op=nl.add)
    return copied_out(total)


def inputs():
    return (ramp(4, 13),)


def answer(x):
    return x.sum(axis=1, keepdims=True)

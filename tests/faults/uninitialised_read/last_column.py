"""The DMA brings one column less than the instruction reads."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(x, sick):
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    columns = x.shape[1] - 1 if sick else x.shape[1]
    nisa.dma_copy(dst=tile[:, 0:columns], src=x[:, 0:columns])
    doubled = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.tensor_tensor(dst=doubled, data1=tile, data2=tile, op=nl.add)  # blamed
    return copied_out(doubled)


def inputs():
    return (ramp(8, 16),)


def answer(x):
    return x + x

"""The frame around an image is read by the convolution and never filled."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(x, sick):
    padded = nl.ndarray((4, 10), dtype=nl.float32)
    if not sick:
        nisa.memset(dst=padded, value=0.0)
    nisa.dma_copy(dst=padded[:, 1:9], src=x)
    total = nl.zeros((4, 8), dtype=nl.float32)
    for tap in range(3):
        nisa.tensor_tensor(dst=total, data1=total, data2=padded[:, tap : tap + 8], op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    wide = np.pad(x, ((0, 0), (1, 1)))
    return wide[:, 0:8] + wide[:, 1:9] + wide[:, 2:10]

"""Rows of a tile that lie more than 32767 elements apart: a stride is a signed 16-bit number."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-STRIDE"


def kernel(x, sick):
    tile = nl.load(x)
    result = nl.ndarray((1, 2, 8), dtype=nl.uint8)
    if sick:
        nisa.tensor_copy(dst=result, src=tile[:, :, 0:8])  # blamed
    else:
        for row in range(2):
            nisa.tensor_copy(dst=result[:, row], src=tile[:, row, 0:8])
    return copied_out(result)


def inputs():
    return (ramp(1, 80000, dtype=np.uint8).reshape(1, 2, 40000),)


def answer(x):
    return x[:, :, :8]

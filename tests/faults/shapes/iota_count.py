"""The pattern of an iota gives fewer numbers than the tile has elements."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-AFFINE-COUNT"


def kernel(x, sick):
    positions = nl.ndarray((4, 12), dtype=nl.int32)
    pattern = [[1, 4]] if sick else [[4, 3], [1, 4]]
    nisa.iota(dst=positions, pattern=pattern, offset=0)  # blamed
    total = nl.ndarray((4, 12), dtype=nl.int32)
    nisa.tensor_tensor(dst=total, data1=positions, data2=nl.load(x), op=nl.add)
    return copied_out(total)


def inputs():
    return (ramp(4, 12, dtype=np.int32),)


def answer(x):
    return x + np.arange(12, dtype=np.int32)

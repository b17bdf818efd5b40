"""An integer tile is filled with 1.5."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-MEMSET-INTEGER"


def kernel(x, sick):
    tile = nl.ndarray((4, 4), dtype=nl.int32)
    nisa.memset(dst=tile, value=1.5 if sick else 2)  # blamed
    nisa.tensor_tensor(dst=tile, data1=tile, data2=nl.load(x), op=nl.add)
    return copied_out(tile)


def inputs():
    return (ramp(4, 4, dtype=np.int32),)


def answer(x):
    return x + 2

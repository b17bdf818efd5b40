"""Host data in float8_e4m3fn reach 448, the chip's float8_e4m3 only 240."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-FP8-RANGE"


def kernel(x, small, sick):
    kept, scaled = nl.load(x), nl.load(small)
    wide = nl.ndarray((4, 4), dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=kept if sick else scaled)  # blamed
    return copied_out(wide)


def inputs():
    kind = ml_dtypes.float8_e4m3fn
    return np.full((4, 4), 448, kind), np.full((4, 4), 224, kind)


def answer(x, small):
    return small.astype(np.float32)

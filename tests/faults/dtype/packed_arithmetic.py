"""Four fp8 values in one element are added as if they were numbers."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-PACKED-DTYPE"
TARGET = "trn3"


def kernel(x, sick):
    bits = nl.load(x)
    tile = bits.view(nl.float8_e4m3fn_x4 if sick else nl.float8_e4m3fn)
    result = nl.ndarray(tile.shape, dtype=tile.dtype)
    nisa.tensor_tensor(dst=result, data1=tile, data2=tile, op=nl.add)  # blamed
    wide = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=result)
    return copied_out(wide)


def inputs():
    return (np.full((4, 8), 8, ml_dtypes.float8_e4m3fn).view(np.uint32),)


def answer(x):
    return np.full((4, 8), 16, np.float32)

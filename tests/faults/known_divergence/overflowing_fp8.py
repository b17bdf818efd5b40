"""Activations are cast to fp8 without a scale, and those beyond 240 become infinite."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-FP8-OVERFLOW"


def kernel(x, sick):
    tile = nl.load(x)
    if not sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=0.5)
    small = nl.ndarray((4, 8), dtype=nl.float8_e4m3)
    nisa.tensor_copy(dst=small, src=tile)  # blamed
    wide = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=small)
    return copied_out(wide)


def inputs():
    return (np.tile(np.array([[256, 64]], np.float32), (4, 4)),)


def answer(x):
    return x / 2

"""Positions beyond 2**24 are compared on the float32 path, where neighbours are equal."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-INT-FLOAT32"


def kernel(positions, sick):
    tile = nl.load(positions)
    if not sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.bitwise_and, operand0=2**24 - 1)
    before = nl.ndarray((4, 1), dtype=nl.int32)
    nisa.tensor_scalar(dst=before, data=tile, op0=nl.less, operand0=2.0)  # blamed
    return copied_out(before)


def inputs():
    return (np.array([[2**24 + 1], [2**24 + 3], [1], [7]], np.int32),)


def answer(positions):
    return ((positions & (2**24 - 1)) < 2).astype(np.int32)

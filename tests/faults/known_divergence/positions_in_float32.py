"""Positions beyond 2**24 are stored as float32 by a DMA that converts."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-INT-FLOAT32"


def kernel(positions, sick):
    tile = nl.load(positions)
    kind = nl.float32 if sick else nl.int32
    moved = nl.ndarray((4, 1), dtype=kind, name="moved")
    nisa.tensor_copy(dst=moved, src=tile)  # blamed
    return copied_out(moved)


def inputs():
    return (np.array([[2**24 + 1], [2**24 + 3], [5], [7]], np.int32),)


def answer(positions):
    return positions

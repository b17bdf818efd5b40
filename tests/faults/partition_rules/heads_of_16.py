"""Sixteen rows per head: the second head begins inside a quadrant."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-PARTITION-START"


def kernel(x, sick):
    height = 16 if sick else 32
    tile = nl.zeros((64, 4), dtype=nl.float32)
    for head in range(2):
        nisa.dma_copy(dst=tile[head * height : head * height + 16], src=x[head])
    out = nl.ndarray((2, 16, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for head in range(2):
        rows = tile[head * height : head * height + 16]
        nisa.tensor_scalar(dst=rows, data=rows, op0=nl.multiply, operand0=2.0)  # blamed
        nisa.dma_copy(dst=out[head], src=rows)
    return out


def inputs():
    return (ramp(2, 16, 4),)


def answer(x):
    return 2 * x

"""A row of a table in HBM is overwritten with a column that crosses it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-DMA-OVERLAP"


def kernel(x, sick):
    table = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="table")
    nisa.dma_copy(dst=table, src=nl.load(x))
    rows = nl.ds(0, 4) if sick else nl.ds(1, 3)
    row = table[0:1, rows]
    nisa.dma_copy(dst=row, src=table[rows, 0:1])  # blamed
    return table


def inputs():
    return (ramp(4, 4),)


def answer(x):
    table = x.copy()
    table[0, 1:] = x[1:, 0]
    return table

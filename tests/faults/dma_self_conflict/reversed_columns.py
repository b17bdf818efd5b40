"""Columns of a tile are moved right within the tile."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-DMA-OVERLAP"


def kernel(x, sick):
    tile = nl.load(x)
    start = 2 if sick else 4
    nisa.dma_copy(dst=tile[:, start : start + 4], src=tile[:, 0:4])  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return np.concatenate([x[:, 0:4], x[:, 0:4]], axis=1)

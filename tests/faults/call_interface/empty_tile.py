"""A tile without columns."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-SHAPE"


def kernel(x, sick):
    rest = x.shape[1] % 4
    columns = rest if sick else 4
    tile = nl.ndarray((4, columns), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x[:, 0:columns])
    return copied_out(tile)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x[:, 0:4]

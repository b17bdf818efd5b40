"""A register selects a column beyond the last."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-OOB"


def kernel(x, sick):
    column = nisa.register_alloc(4 if sick else 3)
    tile = nl.ndarray((6, 1), dtype=nl.float32)
    chosen = x.ap(pattern=[[4, 6], [1, 1]], scalar_offset=column, indirect_dim=1)
    nisa.dma_copy(dst=tile, src=chosen)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(6, 4),)


def answer(x):
    return x[:, 3:4]

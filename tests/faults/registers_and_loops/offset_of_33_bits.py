"""A byte offset into a large table does not fit into a register."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTER-IMMEDIATE"


def kernel(x, sick):
    rows = 2**22
    offset = nisa.register_alloc(0)
    nisa.register_move(dst=offset, src=rows * 4 * 1024 if sick else 2)  # blamed
    tile = nl.ndarray((1, 4), dtype=nl.float32)
    nisa.dma_copy(dst=tile, src=x.ap(pattern=[[4, 1], [1, 4]], scalar_offset=offset, indirect_dim=0))
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x[2:3]

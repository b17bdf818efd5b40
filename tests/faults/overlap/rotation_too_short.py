"""Two buffers rotate over three loads that are all in flight."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-MEM-CLOBBER"


def kernel(x, sick):
    slots = 2 if sick else 3
    tiles = []
    for i in range(3):
        tile = nl.ndarray((8, 4), dtype=nl.float32, name=f"tile{i}", address=(0, i % slots * 16))
        nisa.dma_copy(dst=tile, src=x[:, i * 4 : i * 4 + 4])
        tiles.append(tile)
    total = nl.zeros((8, 4), dtype=nl.float32)
    for tile in tiles:
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return (ramp(8, 12),)


def answer(x):
    return x.reshape(8, 3, 4).sum(axis=1)

"""Four loaded tiles stay alive until the end, where three would fit."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-CAPACITY"
TARGET = "trn1"


def kernel(x, sick):
    total = nl.zeros((1, 4), dtype=nl.float32)
    tiles = []
    for i in range(4):
        tile = nl.ndarray((1, 15000), dtype=nl.float32)  # blamed
        nisa.dma_copy(dst=tile, src=x[i : i + 1])
        if sick:
            tiles.append(tile)
        else:
            nisa.tensor_tensor(dst=total, data1=total, data2=tile[:, 0:4], op=nl.add)
    for tile in tiles:
        nisa.tensor_tensor(dst=total, data1=total, data2=tile[:, 0:4], op=nl.add)
    return copied_out(total)


def inputs():
    return (ramp(4, 15000),)


def answer(x):
    return x[:, 0:4].sum(axis=0, keepdims=True)

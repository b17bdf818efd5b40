"""Weights that stay for the whole loop share bytes with the tile that is loaded in it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-MEM-CLOBBER"


def kernel(x, w, sick):
    weights = nl.ndarray((8, 4), dtype=nl.float32, name="weights", address=(0, 1024))
    nisa.dma_copy(dst=weights, src=w)
    out = nl.ndarray((2, 8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for i in range(2):
        place = (0, 1024 if sick and i else 2048)
        tile = nl.ndarray((8, 4), dtype=nl.float32, name=f"tile{i}", address=place)
        nisa.dma_copy(dst=tile, src=x[i])
        product = nl.ndarray((8, 4), dtype=nl.float32)
        nisa.tensor_tensor(dst=product, data1=tile, data2=weights, op=nl.multiply)  # blamed
        nisa.dma_copy(dst=out[i], src=product)
    return out


def inputs():
    return ramp(2, 8, 4), ramp(8, 4)


def answer(x, w):
    return x * w

"""Weights of all layers are kept; the line that made most of the live tiles is blamed."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-CAPACITY"


def kernel(x, weights, sick):
    rows, columns = x.shape
    total = nl.load(x)
    kept = []
    for layer in range(weights.shape[0]):
        tile = nl.ndarray((rows, columns), dtype=x.dtype)  # blamed
        nisa.dma_copy(dst=tile, src=weights[layer])
        kept.append(tile)
        if not sick:
            nisa.tensor_tensor(dst=total, data1=total, data2=kept.pop(), op=nl.add)
    for tile in kept:
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    return copied_out(total)


def inputs():
    return ramp(2, 8192), ramp(7, 2, 8192)


def answer(x, weights):
    return x + weights.sum(0)

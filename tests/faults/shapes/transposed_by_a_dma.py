"""The destination of a DMA transpose keeps the dims of its source."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-DMA-TRANSPOSE-SHAPE"


def kernel(x, sick):
    shape = (32, 16) if sick else (16, 32)
    tile = nl.ndarray(shape, dtype=nl.bfloat16)
    nisa.dma_transpose(dst=tile, src=x)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(32, 16, dtype=ml_dtypes.bfloat16),)


def answer(x):
    return x.T

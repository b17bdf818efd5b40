"""A DMA by hardware descriptors is to convert float32 to bfloat16."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-DMA-HWDGE"


def kernel(x, sick):
    tile = nl.ndarray((4, 4), dtype=nl.bfloat16)
    mode = nisa.dge_mode.hwdge if sick else nisa.dge_mode.swdge
    nisa.dma_copy(dst=tile, src=x, dge_mode=mode)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x.astype(ml_dtypes.bfloat16)

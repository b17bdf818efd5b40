"""Descriptor generation in hardware exists from gen3 on."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-DMA-HWDGE"
TARGET = "trn1"


def kernel(x, sick):
    tile = nl.ndarray((4, 4), dtype=nl.float32)
    mode = nisa.dge_mode.hwdge if sick else nisa.dge_mode.unknown
    nisa.dma_copy(dst=tile, src=x, dge_mode=mode)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x

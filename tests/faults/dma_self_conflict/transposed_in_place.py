"""A square is transposed onto itself by an access pattern."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-DMA-OVERLAP"


def kernel(x, sick):
    square = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="square")
    nisa.dma_copy(dst=square, src=nl.load(x))
    turned = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="turned")
    target = square if sick else turned
    nisa.dma_copy(dst=target, src=square.ap(pattern=[[1, 4], [4, 4]]))  # blamed
    nisa.dma_copy(dst=turned, src=square) if sick else None
    return turned


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x.T

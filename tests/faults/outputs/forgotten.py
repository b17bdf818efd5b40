"""The kernel writes two outputs and returns one."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-OUTPUT-FORGOTTEN"


def kernel(x, sick):
    first = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="first")
    second = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="second")  # blamed
    tile = nl.load(x)
    nisa.dma_copy(dst=first, src=tile)
    nisa.dma_copy(dst=second, src=nl.add(tile, tile))
    return (first,) if sick else (first, second)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x, x + x

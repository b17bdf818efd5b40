"""The result is stored to a tensor that is not the one returned."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-OUTPUT-UNWRITTEN"


def kernel(x, sick):
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")  # blamed
    other = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.private_hbm, name="other")
    nisa.dma_copy(dst=other if sick else out, src=nl.load(x))
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

"""The output lies in private HBM."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-OUTPUT-PRIVATE"


def kernel(x, sick):
    buffer = nl.private_hbm if sick else nl.shared_hbm
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=buffer, name="out")  # blamed
    nisa.dma_copy(dst=out, src=nl.load(x))
    return out


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x

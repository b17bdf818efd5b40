"""A loop over whole tiles leaves the ragged last columns out."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-OUTPUT-PARTIAL"


def kernel(x, sick):
    out = nl.ndarray((8, 10), dtype=nl.float32, buffer=nl.shared_hbm, name="out")  # blamed
    last = 8 if sick else 10
    for start in range(0, last, 4):
        end = min(start + 4, last)
        nisa.dma_copy(dst=out[:, start:end], src=nl.load(x[:, start:end]))
    return out


def inputs():
    return (ramp(8, 10),)


def answer(x):
    return x

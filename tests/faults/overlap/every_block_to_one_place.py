"""The destination of a loop's results lacks the loop's variable, and each result replaces the one before."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-UNREAD"


def kernel(x, sick):
    out = nl.ndarray((3, 4, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    kept = nl.ndarray((4, 3, 8), dtype=nl.float32, name="kept")
    nisa.memset(dst=kept, value=0.0)
    for block in range(3):
        place = 0 if sick else block
        nisa.dma_copy(dst=kept[:, place], src=x[block])  # blamed
    for block in range(3):
        nisa.dma_copy(dst=out[block], src=kept[:, block])
    return out


def inputs():
    return (ramp(3, 4, 8),)


def answer(x):
    return x

"""max8 writes eight values, not ten."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-SEARCH-EIGHT"


def kernel(x, sick):
    tile = nl.load(x)
    most = nl.ndarray((4, 10 if sick else 8), dtype=nl.float32)
    nisa.max8(dst=most, src=tile)  # blamed
    return copied_out(most)


def inputs():
    return (ramp(4, 20),)


def answer(x):
    return -np.sort(-x, axis=1)[:, 0:8]

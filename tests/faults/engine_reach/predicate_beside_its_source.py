"""Source and predicate of a predicated copy both lie in PSUM."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-ONE-PSUM-INPUT"


def kernel(x, mask, sick):
    source = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum)
    nisa.tensor_copy(dst=source, src=nl.load(x))
    chosen = nl.load(mask)
    if sick:
        beside = nl.ndarray((4, 8), dtype=nl.uint8, buffer=nl.psum)
        nisa.tensor_copy(dst=beside, src=chosen)
        chosen = beside
    result = nl.zeros((4, 8), dtype=nl.float32)
    nisa.tensor_copy_predicated(dst=result, src=source, predicate=chosen)  # blamed
    return copied_out(result)


def inputs():
    return ramp(4, 8), (ramp(4, 8) % 2).astype(np.uint8)


def answer(x, mask):
    return x * mask

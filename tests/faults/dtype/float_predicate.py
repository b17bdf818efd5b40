"""The result of a comparison in float32 is used as the predicate of a copy."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-DTYPE-ALLOWED"


def kernel(x, sick):
    tile = nl.load(x)
    chosen = nl.ndarray((4, 8), dtype=nl.float32 if sick else nl.uint8)
    nisa.tensor_scalar(dst=chosen, data=tile, op0=nl.greater, operand0=9.0)
    clipped = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=clipped, src=tile)
    nisa.tensor_copy_predicated(dst=clipped, src=9.0, predicate=chosen)  # blamed
    return copied_out(clipped)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return np.minimum(x, 9)

"""range_select exists from gen3 on."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-RANGE-SELECT-CHIP"
TARGET = "trn1"


def kernel(x, low, high, sick):
    tile, first, last = nl.load(x), nl.load(low), nl.load(high)
    kept = nl.ndarray((4, 8), dtype=nl.float32)
    if sick:
        nisa.range_select(kept, tile, nl.greater_equal, nl.less, first, last)  # blamed
    else:
        nisa.tensor_scalar(dst=kept, data=tile, op0=nl.maximum, operand0=first, op1=nl.minimum, operand1=last)
    return copied_out(kept)


def inputs():
    return ramp(4, 8), ramp(4, 1), ramp(4, 1) + 5


def answer(x, low, high):
    return np.minimum(np.maximum(x, low), high)

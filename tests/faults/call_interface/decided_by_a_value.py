"""An `if` looks at an element of a tile."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-TENSOR-OPERATOR"


def kernel(x, sick):
    tile = nl.load(x)
    if sick and tile[0:1, 0:1] > 0:  # blamed
        return copied_out(tile)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.maximum, operand0=0.0)
    return copied_out(tile)


def inputs():
    return (ramp(4, 4) - 8,)


def answer(x):
    return np.maximum(x, 0)

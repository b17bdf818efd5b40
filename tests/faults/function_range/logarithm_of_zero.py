"""The logarithm of a probability that may be zero."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-FUNCTION-RANGE"


def kernel(x, sick):
    tile = nl.load(x)
    if not sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.maximum, operand0=1.0)
    nisa.activation(dst=tile, op=nl.log, data=tile)  # blamed
    return copied_out(tile)


def inputs():
    return (np.tile(np.array([[0, 1]], np.float32), (4, 4)),)


def answer(x):
    return np.zeros_like(x) + 0.0

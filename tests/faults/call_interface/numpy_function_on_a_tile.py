"""A function of numpy is called on a tile."""

from __future__ import annotations

import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-TENSOR-OPERATOR"


def kernel(x, sick):
    tile = nl.load(x)
    result = np.exp(tile) if sick else nl.multiply(tile, 2.0)  # blamed
    return copied_out(result)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return 2 * x

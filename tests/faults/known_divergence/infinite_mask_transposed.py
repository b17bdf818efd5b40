"""Scores are masked with minus infinity, which the Tensor engine of trn1 spreads when it transposes them."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-TRANSPOSE-SPREAD"
TARGET = "trn1"
LOW = -30000.0


def kernel(x, sick):
    scores = nl.load(x)
    low = -np.inf if sick else LOW
    select = {"pattern": [[-1, 8]], "channel_multiplier": 1, "cmp_op": nl.greater_equal}
    nisa.affine_select(dst=scores, on_true_tile=scores, on_false_value=low, **select)
    turned = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=scores)  # blamed
    result = nl.ndarray((8, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=turned)
    return copied_out(result)


def inputs():
    return (ramp(8, 8),)


def answer(x):
    return np.where(np.tri(8, dtype=bool), x, LOW).T

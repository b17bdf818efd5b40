"""The scale of an activation is a bfloat16 tile, because the data are bfloat16."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-DTYPE-ALLOWED"


def kernel(x, factors, sick):
    tile, scale = nl.load(x), nl.load(factors)
    if not sick:
        scale = nl.load(factors, dtype=nl.float32)
    result = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.activation(dst=result, op=nl.relu, data=tile, scale=scale)  # blamed
    return copied_out(result)


def inputs():
    return ramp(4, 8, dtype=ml_dtypes.bfloat16), ramp(4, 1, dtype=ml_dtypes.bfloat16)


def answer(x, factors):
    return x.astype(np.float32) * factors.astype(np.float32)

"""A dtype that NKI does not have."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-DTYPE"


def kernel(x, sick):
    result = nl.ndarray((4, 8), dtype="float64" if sick else "float32")  # blamed
    nisa.tensor_copy(dst=result, src=nl.load(x))
    return copied_out(result)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x

"""exponential is an instruction of gen4."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-EXPONENTIAL-CHIP"


def kernel(x, sick):
    tile = nl.load(x)
    result = nl.ndarray((4, 4), dtype=nl.float32)
    if sick:
        nisa.exponential(dst=result, src=tile)  # blamed
    else:
        nisa.activation(dst=result, op=nl.exp, data=tile)
    return copied_out(result)


def inputs():
    return (np.zeros((4, 4), np.float32),)


def answer(x):
    return np.ones((4, 4), np.float32)

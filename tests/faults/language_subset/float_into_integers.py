"""An integer tile is filled with 1.0."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKI034"


@nki.jit
def sick(x):
    one = nl.ndarray((4, 4), dtype=nl.int32)
    nisa.memset(dst=one, value=1.0)  # blamed
    nisa.tensor_tensor(dst=one, data1=one, data2=nl.load(x), op=nl.add)
    return copied_out(one)


@nki.jit
def kernel(x):
    one = nl.ndarray((4, 4), dtype=nl.int32)
    nisa.memset(dst=one, value=1)
    nisa.tensor_tensor(dst=one, data1=one, data2=nl.load(x), op=nl.add)
    return copied_out(one)


def inputs():
    return (ramp(4, 4, dtype=np.int32),)


def answer(x):
    return x + 1

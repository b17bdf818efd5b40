"""A byte tile fits into SBUF, and has more elements per partition than an instruction can count."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-FREE-SIZE"


def kernel(x, sick):
    tile = nl.load(x)
    size = 70000 if sick else 35000
    result = nl.ndarray((1, 70000), dtype=nl.uint8)
    for start in range(0, 70000, size):
        columns = slice(start, start + size)
        nisa.tensor_scalar(dst=result[:, columns], data=tile[:, columns], op0=nl.add, operand0=1.0)  # blamed
    return copied_out(result)


def inputs():
    return (ramp(1, 70000, dtype=np.uint8),)


def answer(x):
    return x + 1

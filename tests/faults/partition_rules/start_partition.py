"""64 rows that begin at partition 32."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-PARTITION-START"


def kernel(x, sick):
    tile = nl.load(x)
    start = 32 if sick else 64
    rows = tile[start : start + 64]
    nisa.tensor_scalar(dst=rows, data=rows, op0=nl.add, operand0=1.0)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(128, 4),)


def answer(x):
    return x + (np.arange(128)[:, None] >= 64)

"""A tile of 16 columns is added to one of 8."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ELEMENTS-AGREE"


def kernel(x, sick):
    tile = nl.load(x)
    total = nl.ndarray((4, 8), dtype=nl.float32)
    other = tile if sick else tile[:, 8:16]
    nisa.tensor_tensor(dst=total, data1=tile[:, 0:8], data2=other, op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return (ramp(4, 16),)


def answer(x):
    return x[:, 0:8] + x[:, 8:16]

"""nl.affine_range, which is range."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI026"


@nki.jit
def sick(x):
    total = nl.zeros((4, 4), dtype=nl.float32)
    for i in nl.affine_range(2):  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=nl.load(x[i]), op=nl.add)
    return copied_out(total)


@nki.jit
def kernel(x):
    total = nl.zeros((4, 4), dtype=nl.float32)
    for i in range(2):
        nisa.tensor_tensor(dst=total, data1=total, data2=nl.load(x[i]), op=nl.add)
    return copied_out(total)


def inputs():
    return (ramp(2, 4, 4),)


def answer(x):
    return x.sum(axis=0)

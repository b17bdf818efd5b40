"""The pairs of a schedule are written as (producer, consumer)."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ORDER-LATER"


@nki.jit
def doubled(x):
    tile = nl.load(x)
    total = nl.ndarray((4, 8), dtype=nl.float32)
    other = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=tile, data2=tile, op=nl.add, name="double")  # blamed
    nisa.tensor_scalar(dst=other, data=tile, op0=nl.add, operand0=1.0, name="next")
    nisa.tensor_tensor(dst=total, data1=total, data2=other, op=nl.add)
    return copied_out(total)


def kernel(x, sick):
    pair = ("double", "next") if sick else ("next", "double")
    return doubled.with_schedule([pair])(x)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return 3 * x + 1

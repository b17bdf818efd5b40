"""no_reorder is called like a function, and orders nothing."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ORDER-NOT-ENTERED"


def kernel(x, sick):
    tile = nl.load(x)
    total = nl.zeros((4, 8), dtype=nl.float32)
    if sick:
        nl.no_reorder()  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    else:
        with nl.no_reorder():
            nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
            nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    return copied_out(total)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return 2 * x

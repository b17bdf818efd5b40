"""A loop bound that was never loaded."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTER-UNSET"


def kernel(x, sick):
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile = nl.load(x)
    count = nisa.register_alloc() if sick else nisa.register_alloc(2)

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    nl.fori_loop(0, count, body)  # blamed
    return copied_out(total)


def inputs():
    return (ramp(4, 1),)


def answer(x):
    return 2 * x

"""The body hands its sum back, as it would in another framework."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-LOOP-BODY"


def kernel(x, sick):
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile = nl.load(x)

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
        return total if sick else None

    nl.fori_loop(0, 3, body)  # blamed
    return copied_out(total)


def inputs():
    return (ramp(4, 1),)


def answer(x):
    return 3 * x

"""The body of a loop moves its own counter on."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTER-FROZEN"


def kernel(x, sick):
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile = nl.load(x)
    spare = nisa.register_alloc(0)

    def body(i):
        nisa.register_move(i if sick else spare, 0)  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    nl.fori_loop(0, 3, body)
    return copied_out(total)


def inputs():
    return (ramp(4, 1),)


def answer(x):
    return 3 * x

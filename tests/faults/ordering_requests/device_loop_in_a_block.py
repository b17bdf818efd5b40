"""A device loop stands inside a no_reorder block."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ORDER-BLOCK"


def kernel(x, sick):
    tile = nl.load(x)
    total = nl.zeros((4, 8), dtype=nl.float32)

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    if sick:
        with nl.no_reorder():
            nl.fori_loop(0, 2, body)  # blamed
    else:
        nl.fori_loop(0, 2, body)
    return copied_out(total)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return 2 * x

"""depends_on is called on the instruction that was meant to run first."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ORDER-LATER"


def kernel(x, sick):
    tile = nl.load(x)
    first = nl.ndarray((4, 8), dtype=nl.float32)
    second = nl.ndarray((4, 8), dtype=nl.float32)
    before = nisa.tensor_copy(dst=first, src=tile)
    after = nisa.tensor_tensor(dst=second, data1=tile, data2=tile, op=nl.add)
    if sick:
        before.depends_on(after)  # blamed
    else:
        after.depends_on(before)
    nisa.tensor_tensor(dst=second, data1=second, data2=first, op=nl.add)
    return copied_out(second)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return 3 * x

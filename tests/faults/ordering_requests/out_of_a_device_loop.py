"""An instruction after a device loop is to wait for one in the body."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-ORDER-LOOP"


def kernel(x, sick):
    tile = nl.load(x)
    total = nl.ndarray((4, 8), dtype=nl.float32)
    kept = [nisa.memset(dst=total, value=0.0)]

    def body(i):
        added = nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
        if sick:
            kept.append(added)

    nl.fori_loop(0, 2, body)
    last = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    last.depends_on(kept[-1])  # blamed
    nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    return copied_out(total)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return 3 * x + 1

"""A while loop whose body forgets the next register."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-LOOP-CONDITION"


def kernel(x, sick):
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile = nl.load(x)
    done = nisa.register_alloc(0)

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
        return None if sick else done

    nl.while_loop(nisa.register_alloc(1), body)  # blamed
    return copied_out(total)


def inputs():
    return (ramp(4, 1),)


def answer(x):
    return x

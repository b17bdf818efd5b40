"""A register is loaded from a tile of four elements."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTER-TILE"


def kernel(x, counts, sick):
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile, numbers = nl.load(x), nl.load(counts)
    count = nisa.register_alloc()
    nisa.register_load(count, numbers if sick else numbers[:, 0:1])  # blamed

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    nl.fori_loop(0, count, body)
    return copied_out(total)


def inputs():
    return ramp(4, 1), np.array([[2, 3, 4, 5]], np.int32)


def answer(x, counts):
    return counts[0, 0] * x

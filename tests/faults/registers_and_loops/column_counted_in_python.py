"""The body of a device loop counts the column it fills in Python; on the device every iteration fills the first."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-LOOP-CARRIED"


def kernel(x, sick):
    rows = x.shape[0]
    tile = nl.load(x)
    totals = nl.zeros((rows, 4), dtype=nl.float32)
    position = {"column": 0}

    def body(i):
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        place = totals.ap(pattern=[[4, rows], [1, 1]], scalar_offset=i, indirect_dim=1)
        if sick:
            place = totals[:, position["column"] : position["column"] + 1]
            position["column"] += 1
        nisa.tensor_reduce(dst=place, op=nl.add, data=tile, axis=1)  # blamed

    nl.fori_loop(0, 4, body)
    return copied_out(totals)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x.sum(1, keepdims=True) * [[2, 4, 8, 16]]

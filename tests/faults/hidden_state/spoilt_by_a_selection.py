"""A select_reduce with the default reduce_cmd runs between the two halves of a sum."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTERS-IDLE"


def kernel(x, mask, sick):
    tile, chosen = nl.load(x), nl.load(mask)
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    kept = nl.ndarray((4, 8), dtype=nl.float32)
    doubled = nl.ndarray((4, 8), dtype=nl.float32)
    if not sick:
        nisa.select_reduce(dst=kept, predicate=chosen, on_true=tile, on_false=0.0)
    for half in range(2):
        columns = slice(half * 4, half * 4 + 4)
        if sick and half == 1:
            nisa.select_reduce(dst=kept, predicate=chosen, on_true=tile, on_false=0.0)
        command = nisa.reduce_cmd.reduce if half else nisa.reduce_cmd.reset_reduce
        nisa.tensor_scalar_reduce(  # blamed
            dst=doubled[:, columns],
            data=tile[:, columns],
            op0=nl.multiply,
            operand0=2.0,
            reduce_op=nl.add,
            reduce_res=sums,
            reduce_cmd=command,
        )
    nisa.tensor_scalar(dst=kept, data=kept, op0=nl.add, operand0=sums)
    return copied_out(kept)


def inputs():
    return ramp(4, 8), (ramp(4, 8) % 2).astype(np.uint8)


def answer(x, mask):
    return x * mask + 2 * x.sum(axis=1, keepdims=True)

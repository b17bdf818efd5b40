"""The Vector engine's registers hold a maximum, and the next instruction adds to them."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTERS-OPERATOR"


def kernel(x, mask, sick):
    tile, chosen = nl.load(x), nl.load(mask)
    kept = nl.ndarray((4, 8), dtype=nl.float32)
    highest = nl.ndarray((4, 1), dtype=nl.float32)
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    nisa.select_reduce(
        dst=kept,
        predicate=chosen,
        on_true=tile,
        on_false=0.0,
        reduce_res=highest,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    command = nisa.reduce_cmd.reduce if sick else nisa.reduce_cmd.reset_reduce
    nisa.tensor_scalar_reduce(  # blamed
        dst=kept,
        data=kept,
        op0=nl.subtract,
        operand0=highest,
        reduce_op=nl.add,
        reduce_res=sums,
        reduce_cmd=command,
    )
    return copied_out(sums)


def inputs():
    return ramp(4, 8), (ramp(4, 8) % 2).astype(np.uint8)


def answer(x, mask):
    kept = x * mask
    return (kept - kept.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)

"""reduce_res without a reduce_cmd: activation reads out what some earlier program left in the registers."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTERS-UNSET"


def kernel(x, sick):
    tile = nl.load(x)
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    if sick:
        nisa.activation(dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_res=sums)  # blamed
    else:
        nisa.activation_reduce(dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_res=sums)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=sums)
    return copied_out(tile)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x + x.sum(axis=1, keepdims=True)

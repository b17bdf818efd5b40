"""The last block has more rows than the one that reset the registers."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTERS-UNSET"


def kernel(x, sick):
    sums = nl.ndarray((8, 1), dtype=nl.float32)
    tile = nl.load(x)
    rows = 4 if sick else 8
    nisa.activation(
        dst=tile[0:rows, 0:4],
        op=nl.relu,
        data=tile[0:rows, 0:4],
        reduce_op=nl.add,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    nisa.activation(  # blamed
        dst=tile[:, 4:8],
        op=nl.relu,
        data=tile[:, 4:8],
        reduce_op=nl.add,
        reduce_res=sums,
        reduce_cmd=nisa.reduce_cmd.reduce,
    )
    return copied_out(sums)


def inputs():
    return (ramp(8, 8),)


def answer(x):
    return x.sum(axis=1, keepdims=True)

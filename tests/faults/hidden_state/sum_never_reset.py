"""Partial sums are added up in the Scalar registers with reduce from the first block on."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTERS-UNSET"


def kernel(x, sick):
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    for block in range(2):
        tile = nl.load(x[:, block * 4 : block * 4 + 4])
        first = nisa.reduce_cmd.reduce if sick else nisa.reduce_cmd.reset_reduce
        command = nisa.reduce_cmd.reduce if block else first
        nisa.activation(  # blamed
            dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_res=sums, reduce_cmd=command
        )
    return copied_out(sums)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x.sum(axis=1, keepdims=True)

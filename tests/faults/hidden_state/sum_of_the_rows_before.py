"""The registers are reset once before the loop over row blocks, and each sum contains those before it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import ramp

CODE = "NKW-REGISTERS-REOPENED"


def kernel(x, sick):
    out = nl.ndarray((2, 4, 1), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for block in range(2):
        tile = nl.load(x[block])
        sums = nl.ndarray((4, 1), dtype=nl.float32)
        fresh = block == 0 if sick else True
        command = nisa.reduce_cmd.reset_reduce if fresh else nisa.reduce_cmd.reduce
        nisa.activation(  # blamed
            dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_res=sums, reduce_cmd=command
        )
        nisa.dma_copy(dst=out[block], src=sums)
    return out


def inputs():
    return (ramp(2, 4, 8),)


def answer(x):
    return x.sum(axis=2, keepdims=True)

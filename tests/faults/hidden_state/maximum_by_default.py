"""select_reduce is asked for the maximum and keeps its default command, which does not accumulate."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-REGISTERS-IDLE"


def kernel(x, mask, sick):
    tile, chosen = nl.load(x), nl.load(mask)
    kept = nl.ndarray((4, 8), dtype=nl.float32)
    highest = nl.zeros((4, 1), dtype=nl.float32)
    command = nisa.reduce_cmd.idle if sick else nisa.reduce_cmd.reset_reduce
    nisa.select_reduce(  # blamed
        dst=kept, predicate=chosen, on_true=tile, on_false=0.0, reduce_res=highest, reduce_cmd=command
    )
    nisa.tensor_scalar(dst=kept, data=kept, op0=nl.subtract, operand0=highest)
    return copied_out(kept)


def inputs():
    return ramp(4, 8), (ramp(4, 8) % 2).astype(np.uint8)


def answer(x, mask):
    kept = x * mask
    return kept - kept.max(axis=1, keepdims=True)

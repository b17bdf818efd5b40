"""The seed goes to GpSimd, and the random bits are drawn by the Vector engine."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-RANDOM-UNSEEDED"


def kernel(x, words, sick):
    tile = nl.load(x)
    state = nl.load(words)
    nisa.rand_set_state(src_seeds=state, engine=nisa.engine.gpsimd)
    bits = nl.ndarray((4, 8), dtype=nl.int32)
    engine = nisa.engine.vector if sick else nisa.engine.gpsimd
    nisa.rng(dst=bits, engine=engine)  # blamed
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.bitwise_and, operand0=0)
    nisa.tensor_tensor(dst=bits, data1=bits, data2=tile, op=nl.add)
    return copied_out(bits)


def inputs():
    return ramp(4, 8, dtype=np.int32), (ramp(4, 6) + 1).astype(np.uint32)


def answer(x, words):
    return x

"""Dropout without a seed: every run of the program drops other elements."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-RANDOM-UNSEEDED"


def kernel(x, seed, sick):
    tile, word = nl.load(x), nl.load(seed)
    dropped = nl.ndarray((4, 8), dtype=nl.float32)
    if not sick:
        nisa.set_rng_seed(src_seeds=word)
    nisa.dropout(dst=dropped, data=tile, prob=1.0)  # blamed
    nisa.tensor_tensor(dst=dropped, data1=dropped, data2=tile, op=nl.add)
    return copied_out(dropped)


def inputs():
    return ramp(4, 8), np.array([[42]], np.int32)


def answer(x, seed):
    return x

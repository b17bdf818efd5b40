"""nonzero_with_count exists from gen3 on."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-NONZERO-CHIP"
TARGET = "trn1"


def kernel(x, sick):
    tile = nl.load(x)
    result = nl.ndarray((1, 9), dtype=nl.int32)
    if sick:
        nisa.nonzero_with_count(dst=result, src=tile)  # blamed
    nisa.tensor_reduce(dst=result[:, 8:9], op=nl.add, data=tile, axis=1)
    return copied_out(result[:, 8:9])


def inputs():
    return (ramp(1, 8, dtype=np.int32),)


def answer(x):
    return x.sum(axis=1, keepdims=True).astype(np.int32)

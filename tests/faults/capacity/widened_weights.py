"""bfloat16 weights fit; their float32 copies, kept for the whole kernel, do not."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-CAPACITY"
TARGET = "trn1"


def kernel(x, sick):
    weights = nl.load(x)
    wide = nl.ndarray((1, 3, 10000), dtype=nl.float32 if sick else nl.bfloat16)  # blamed
    for layer in range(3):
        nisa.tensor_copy(dst=wide[:, layer], src=weights[:, layer])
    total = nl.ndarray((1, 10000), dtype=nl.bfloat16)
    nisa.tensor_tensor(dst=total, data1=wide[:, 0], data2=wide[:, 2], op=nl.add)
    nisa.tensor_tensor(dst=total, data1=total, data2=weights[:, 1], op=nl.add)
    return copied_out(total)


def inputs():
    return (ramp(1, 3, 10000, dtype=ml_dtypes.bfloat16),)


def answer(x):
    return x.astype(np.float32).sum(axis=1).astype(ml_dtypes.bfloat16)

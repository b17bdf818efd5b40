"""A bitwise and of float32 tiles."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-BITVEC-INTEGER"


def kernel(x, y, sick):
    kind = nl.float32 if sick else nl.int32
    left, right = nl.load(x, dtype=kind), nl.load(y, dtype=kind)
    both = nl.ndarray((4, 4), dtype=kind)
    nisa.tensor_tensor(dst=both, data1=left, data2=right, op=nl.bitwise_and)  # blamed
    return copied_out(both)


def inputs():
    return ramp(4, 4, dtype=np.int32), ramp(4, 4, dtype=np.int32) + 5


def answer(x, y):
    return x & y

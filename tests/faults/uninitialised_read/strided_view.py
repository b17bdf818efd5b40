"""Even columns are written, and all columns are read through a reshaped view."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(x, sick):
    tile = nl.ndarray((8, 16), dtype=nl.float32)
    nisa.memset(dst=tile[:, 0:16:2], value=0.0)
    if not sick:
        nisa.memset(dst=tile[:, 1:16:2], value=0.0)
    total = nl.ndarray((8, 16), dtype=nl.float32)
    pairs = tile.reshape((8, 8, 2))
    nisa.tensor_tensor(dst=total, data1=nl.load(x), data2=pairs, op=nl.add)  # blamed
    return copied_out(total)


def inputs():
    return (ramp(8, 16),)


def answer(x):
    return x

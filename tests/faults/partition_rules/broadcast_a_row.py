"""One row is to be spread over 128 partitions by a view."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-BROADCAST"


def kernel(x, sick):
    row = nl.load(x)
    wide = row.expand_dim(1).broadcast(0 if sick else 1, 3)  # blamed
    tile = nl.ndarray((1, 3, 4), dtype=nl.float32)
    nisa.tensor_copy(dst=tile, src=wide)
    return copied_out(tile)


def inputs():
    return (ramp(1, 4),)


def answer(x):
    return np.broadcast_to(x[:, None], (1, 3, 4))

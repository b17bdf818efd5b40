"""Key heads are repeated for grouped queries by broadcasting a dim that has two already."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-BROADCAST"


def kernel(keys, sick):
    tile = nl.load(keys)
    repeated = nl.ndarray((4, 8, 3), dtype=nl.float32)
    heads = tile if sick else tile.expand_dim(2)
    wide = heads.broadcast(1, 8) if sick else heads.broadcast(2, 4)  # blamed
    nisa.tensor_copy(dst=repeated, src=wide)
    return copied_out(repeated)


def inputs():
    return (ramp(4, 2, 3),)


def answer(keys):
    return np.repeat(keys, 4, axis=1)

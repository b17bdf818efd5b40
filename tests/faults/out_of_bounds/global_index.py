"""Indices into the whole vocabulary are used within one shard of it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-N-GATHER-INDEX"


def kernel(shard, ids, sick):
    values, places = nl.load(shard), nl.load(ids)
    if not sick:
        nisa.tensor_scalar(dst=places, data=places, op0=nl.subtract, operand0=8.0)
    chosen = nl.ndarray((4, 2), dtype=nl.float32)
    nisa.nc_n_gather(dst=chosen, data=values, indices=places)  # blamed
    return copied_out(chosen)


def inputs():
    return ramp(4, 8), np.tile(np.array([[9, 15]], np.uint32), (4, 1))


def answer(shard, ids):
    return shard[:, [1, 7]]

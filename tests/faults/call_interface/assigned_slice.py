"""A slice of a tile is assigned to."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-MUTATION"


def kernel(x, sick):
    tile = nl.load(x)
    result = nl.ndarray((4, 4), dtype=nl.float32)
    if sick:
        result[:, 0:4] = tile  # blamed
    nisa.tensor_copy(dst=result, src=tile)
    return copied_out(result)


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x

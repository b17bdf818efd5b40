"""`+` between tiles, seen in the source."""

from __future__ import annotations

import nki
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI019"


@nki.jit
def sick(x):
    tile = nl.load(x)
    return copied_out(tile + tile)  # blamed


@nki.jit
def kernel(x):
    tile = nl.load(x)
    return copied_out(nl.add(tile, tile))


def inputs():
    return (ramp(4, 4),)


def answer(x):
    return x + x

"""A list comprehension over tiles."""

from __future__ import annotations

import nki
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKI032"


@nki.jit
def sick(x):
    tiles = [nl.load(x[i]) for i in range(2)]  # blamed
    return copied_out(tiles[1])


@nki.jit
def kernel(x):
    tiles = []
    for i in range(2):
        tiles.append(nl.load(x[i]))
    return copied_out(tiles[1])


def inputs():
    return (ramp(2, 4, 4),)


def answer(x):
    return x[1]

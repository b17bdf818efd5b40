"""nl.add of a tile and a column: the short forms do not broadcast."""

from __future__ import annotations

import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-NL-SHAPES"


def kernel(x, column, sick):
    tile, bias = nl.load(x), nl.load(column)
    wide = bias if sick else bias.broadcast(1, 4)
    return copied_out(nl.add(tile, wide))  # blamed


def inputs():
    return ramp(4, 4), ramp(4, 1)


def answer(x, column):
    return x + column

"""A reshape to fewer elements."""

from __future__ import annotations

import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-RESHAPE-SIZE"


def kernel(x, sick):
    tile = nl.load(x)
    view = tile.reshape((4, 2, 3) if sick else (4, 2, 4))  # blamed
    return copied_out(view)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x.reshape(4, 2, 4)

"""The head number counts from one."""

from __future__ import annotations

import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-INDEX"


def kernel(x, sick):
    heads = x.shape[0]
    tile = nl.load(x[heads if sick else heads - 1])  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(3, 4, 5),)


def answer(x):
    return x[2]

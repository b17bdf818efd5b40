"""nl.ds takes a size, and gets an end."""

from __future__ import annotations

import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-INDEX"


def kernel(x, sick):
    tile = nl.load(x)
    part = tile[:, nl.ds(4, 8 if sick else 4)]  # blamed
    return copied_out(part)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x[:, 4:8]

"""A tensor of two dims is indexed with three."""

from __future__ import annotations

import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-INDEX"


def kernel(x, sick):
    tile = nl.load(x)
    part = tile[:, 0:2, 0] if sick else tile[:, 0:2]  # blamed
    return copied_out(part)


def inputs():
    return (ramp(4, 5),)


def answer(x):
    return x[:, 0:2]

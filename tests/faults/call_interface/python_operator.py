"""Tiles are added with +."""

from __future__ import annotations

import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TENSOR-OPERATOR"


def kernel(x, y, sick):
    left, right = nl.load(x), nl.load(y)
    total = left + right if sick else nl.add(left, right)  # blamed
    return copied_out(total)


def inputs():
    return ramp(4, 4), ramp(4, 4)


def answer(x, y):
    return x + y

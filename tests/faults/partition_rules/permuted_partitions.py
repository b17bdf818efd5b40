"""A transpose by permute would move the partition dim."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PARTITION-FIRST"


def kernel(x, sick):
    tile = nl.load(x)
    turned = tile.permute((1, 0, 2) if sick else (0, 2, 1))  # blamed
    result = nl.ndarray((4, 3, 2), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=turned)
    return copied_out(result)


def inputs():
    return (ramp(4, 2, 3),)


def answer(x):
    return x.transpose(0, 2, 1)

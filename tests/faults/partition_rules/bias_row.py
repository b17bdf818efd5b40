"""A bias per column is added to every row; a row does not spread over partitions."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-PARTITIONS-AGREE"


def kernel(x, bias, sick):
    tile = nl.load(x)
    row = nl.load(bias)
    added = row if sick else nl.broadcast_to(row, (8, 6))
    nisa.tensor_tensor(dst=tile, data1=tile, data2=added, op=nl.add)  # blamed
    return copied_out(tile)


def inputs():
    return ramp(8, 6), ramp(1, 6)


def answer(x, bias):
    return x + bias

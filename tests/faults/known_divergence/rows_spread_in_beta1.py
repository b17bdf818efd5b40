"""An operator of Beta 1 spreads one row over all partitions."""

from __future__ import annotations

from neuronxcc import nki
from neuronxcc.nki import language as nl

from tests.faults.data import ramp

CODE = "NKW-BETA1-BROADCAST"


@nki.jit
def kernel(x, bias, sick):
    out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm)
    tile, row = nl.load(x), nl.load(bias)
    added = row if sick else nl.broadcast_to(row, shape=(4, 8))
    nl.store(out, nl.add(tile, added))  # blamed
    return out


def inputs():
    return ramp(4, 8), ramp(1, 8)


def answer(x, bias):
    return x + bias

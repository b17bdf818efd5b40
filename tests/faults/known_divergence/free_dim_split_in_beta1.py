"""A filled tile of Beta 1 is reshaped so that its free dim becomes two."""

from __future__ import annotations

from neuronxcc import nki
from neuronxcc.nki import language as nl

from tests.faults.data import ramp

CODE = "NKW-BETA1-RESHAPE"


@nki.jit
def kernel(x, sick):
    out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x)
    if sick:
        halves = tile.reshape((4, 2, 4))  # blamed
        second = nl.copy(halves[:, 1])
    else:
        second = nl.copy(tile[:, 4:8])
    nl.store(out, second)
    return out


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return x[:, 4:8]

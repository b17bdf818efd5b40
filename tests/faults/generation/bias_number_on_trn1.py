"""On gen2 the bias of activation is a tile."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-BIAS-IMMEDIATE"
TARGET = "trn1"


def kernel(x, sick):
    tile = nl.load(x)
    bias = 1.0 if sick else nl.ones((4, 1), dtype=nl.float32)
    nisa.activation(dst=tile, op=nl.relu, data=tile, bias=bias)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 4) - 8,)


def answer(x):
    return np.maximum(x + 1, 0)

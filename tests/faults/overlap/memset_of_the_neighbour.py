"""Clearing a tile that is too long for its place clears the statistics beside it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-MEM-CLOBBER"


def kernel(x, sick):
    tile = nl.load(x)
    maxima = nl.ndarray((8, 1), dtype=nl.float32, name="maxima", address=(0, 4096))
    nisa.tensor_reduce(dst=maxima, op=nl.maximum, data=tile, axis=1)
    scratch = nl.ndarray((8, 9 if sick else 8), dtype=nl.float32, name="scratch", address=(0, 4096 - 32))
    nisa.memset(dst=scratch, value=0.0)
    result = nl.ndarray((8, 8), dtype=nl.float32)
    nisa.tensor_scalar(dst=result, data=scratch[:, 0:8], op0=nl.add, operand0=maxima)  # blamed
    return copied_out(result)


def inputs():
    return (ramp(8, 6),)


def answer(x):
    return np.repeat(x.max(axis=1, keepdims=True), 8, axis=1)

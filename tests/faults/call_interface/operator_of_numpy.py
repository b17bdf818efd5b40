"""The operator is numpy's function, as in Beta 1."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-OPERATOR"


def kernel(x, sick):
    tile = nl.load(x)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=np.hypot if sick else nl.add)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(4, 8),)


def answer(x):
    return 2 * x

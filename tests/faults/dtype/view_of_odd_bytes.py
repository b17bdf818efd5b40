"""Three int8 columns cannot be seen as int16."""

from __future__ import annotations

import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-VIEW-DTYPE"


def kernel(x, sick):
    tile = nl.load(x)
    columns = 3 if sick else 4
    view = tile[:, 0:columns].view(nl.int16)  # blamed
    return copied_out(view)


def inputs():
    return (ramp(4, 8, dtype=np.int8),)


def answer(x):
    return np.ascontiguousarray(x[:, 0:4]).view(np.int16)

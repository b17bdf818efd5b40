"""An integer counter is incremented before it was set; integers have no NaN that would show."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(x, sick):
    counter = nl.ndarray(x.shape, dtype=nl.int32)
    if not sick:
        nisa.memset(dst=counter, value=0)
    step = nl.load(x)
    nisa.tensor_tensor(dst=counter, data1=counter, data2=step, op=nl.add)  # blamed
    return copied_out(counter)


def inputs():
    return (ramp(4, 4, dtype=np.int32),)


def answer(x):
    return x

"""A predicated copy keeps what dst held, and dst held nothing."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-UNWRITTEN"


def kernel(x, mask, sick):
    source, predicate = nl.load(x), nl.load(mask)
    result = nl.ndarray(x.shape, dtype=x.dtype)
    if not sick:
        nisa.memset(dst=result, value=0.0)
    nisa.tensor_copy_predicated(dst=result, src=source, predicate=predicate)
    doubled = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.tensor_tensor(dst=doubled, data1=result, data2=result, op=nl.add)  # blamed
    return copied_out(doubled)


def inputs():
    return ramp(4, 6), (ramp(4, 6) % 2).astype(np.uint8)


def answer(x, mask):
    return 2 * x * mask

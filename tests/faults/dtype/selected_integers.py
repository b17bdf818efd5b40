"""Token ids are chosen with select_reduce, which takes no 32-bit integers."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-SELECT-REDUCE-DTYPE"


def kernel(ids, mask, sick):
    tile, chosen = nl.load(ids), nl.load(mask)
    result = nl.ndarray((4, 8), dtype=nl.int32)
    if sick:
        nisa.select_reduce(dst=result, predicate=chosen, on_true=tile, on_false=0.0)  # blamed
    else:
        nisa.memset(dst=result, value=0)
        nisa.tensor_copy_predicated(dst=result, src=tile, predicate=chosen)
    return copied_out(result)


def inputs():
    return ramp(4, 8, dtype=np.int32), (ramp(4, 8) % 2).astype(np.uint8)


def answer(ids, mask):
    return ids * mask

"""nonzero_with_count fills one partition of sixteen; the copy takes all of them."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-UNWRITTEN"


def kernel(x, sick):
    flags = nl.load(x)
    places = nl.ndarray((17, 5), dtype=nl.int32)
    nisa.nonzero_with_count(dst=places, src=flags, padding_val=-1)
    last = 17 if sick else 1
    kept = nl.ndarray((last, 5), dtype=nl.int32)
    nisa.tensor_copy(dst=kept, src=places[0:last])  # blamed
    return copied_out(kept)


def inputs():
    return (np.tile(np.array([[0, 1, 0, 1]], np.int32), (17, 1)),)


def answer(x):
    return np.array([[1, 3, -1, -1, 2]], np.int32)

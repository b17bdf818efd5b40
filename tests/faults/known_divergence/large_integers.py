"""Vocabulary offsets beyond 2**24 are added on the float32 path."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-INT-FLOAT32"


def kernel(ids, sick):
    tile = nl.load(ids)
    engine = nisa.engine.vector if sick else nisa.engine.gpsimd
    doubled = nl.ndarray((4, 1), dtype=nl.int32, name="doubled")
    nisa.tensor_tensor(dst=doubled, data1=tile, data2=tile, op=nl.add, engine=engine)  # blamed
    return copied_out(doubled)


def inputs():
    return (np.array([[2**24 + 1], [2**24 + 3], [5], [7]], np.int32),)


def answer(ids):
    return ids + ids

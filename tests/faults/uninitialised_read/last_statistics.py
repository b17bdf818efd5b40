"""Statistics of the short last chunk are left out, and bn_aggr joins all of them."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-UNWRITTEN"


def kernel(x, sick):
    tile = nl.load(x)
    statistics = nl.ndarray((4, 3, 6), dtype=nl.float32)
    for chunk in range(10 // 4 if sick else 3):
        data = tile[:, chunk * 4 : min(chunk * 4 + 4, 10)]
        nisa.bn_stats(dst=statistics[:, chunk], data=data)
    joined = nl.ndarray((4, 2), dtype=nl.float32)
    nisa.bn_aggr(dst=joined, data=statistics.reshape((4, 18)))  # blamed
    return copied_out(joined[:, 0:1])


def inputs():
    return (np.full((4, 10), 5, np.float32),)


def answer(x):
    return np.full((4, 1), 5, np.float32)

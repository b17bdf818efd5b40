"""bn_aggr gets means and variances; it takes triples of count, mean and variance."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-BN-AGGR-TRIPLES"


def kernel(x, sick):
    statistics = nl.ndarray((4, 2, 6), dtype=nl.float32)
    tile = nl.load(x)
    for chunk in range(2):
        nisa.bn_stats(dst=statistics[:, chunk], data=tile[:, chunk * 4 : chunk * 4 + 4])
    joined = nl.ndarray((4, 2), dtype=nl.float32)
    nisa.bn_aggr(dst=joined, data=statistics[:, :, 1:3] if sick else statistics)  # blamed
    return copied_out(joined[:, 0:1])


def inputs():
    return (np.full((4, 8), 3, np.float32),)


def answer(x):
    return np.full((4, 1), 3, np.float32)

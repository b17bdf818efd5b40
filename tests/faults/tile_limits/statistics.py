"""bn_stats over 513 elements."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out

CODE = "NKW-BN-STATS-SIZE"


def kernel(x, sick):
    tile = nl.load(x)
    count = 513 if sick else 512
    stats = nl.ndarray((2, 6), dtype=nl.float32)
    nisa.bn_stats(dst=stats, data=tile[:, 0:count])  # blamed
    return copied_out(stats[:, 0:2])


def inputs():
    return (np.ones((2, 513), np.float32),)


def answer(x):
    return np.array([[256, 1], [256, 1]], np.float32)

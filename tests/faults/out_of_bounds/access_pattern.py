"""An access pattern reaches one element past the tensor."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp

CODE = "NKW-BOUNDS"


def kernel(x, sick):
    tile = nl.ndarray((4, 5), dtype=nl.float32)
    windows = x.ap(pattern=[[1, 4], [1, 5]], offset=1 if sick else 0)
    nisa.dma_copy(dst=tile, src=windows)  # blamed
    return copied_out(tile)


def inputs():
    return (ramp(8),)


def answer(x):
    return np.lib.stride_tricks.sliding_window_view(x, 5)

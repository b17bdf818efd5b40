"""running_sum: the sum of each row up to every column."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def running_sum(x):
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    for first in range(0, rows, ROWS):
        last = min(rows, first + ROWS)
        tile = nl.load(x[first:last])
        ones = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=ones, value=1.0)
        sums = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor_scan(dst=sums, data0=ones, data1=tile, initial=0.0, op0=nl.multiply, op1=nl.add)
        nisa.dma_copy(dst=out[first:last], src=sums)
    return out


def running_sum_reference(x: np.ndarray) -> np.ndarray:
    return np.cumsum(x, axis=1)


ARGUMENTS = ["f32[200,64]"]
SLOW = ("ROWS = 128", "ROWS = 16")
WRONG = {
    "wrong start": ("initial=0.0", "initial=1.0", "error"),
    "wrong operator": ("op1=nl.add", "op1=nl.maximum", "error"),
    "decaying sum": ("value=1.0", "value=0.99", "error"),
    "off by one column": (
        "data0=ones, data1=tile, initial",
        "data0=ones[:, 1:columns], data1=tile[:, 0 : columns - 1], initial",
        "NKW|error",
    ),
    "precision": (
        "sums = nl.ndarray(tile.shape, dtype=nl.float32",
        "sums = nl.ndarray(tile.shape, dtype=nl.bfloat16",
        "error",
    ),
    "missing last tile": ("range(0, rows, ROWS)", "range(0, rows - ROWS, ROWS)", "unwritten"),
    "unwritten output": ("nisa.dma_copy(dst=out[first:last], src=sums)", "pass", "unwritten"),
    "copy of input": ("src=sums)", "src=tile)", "copy of argument 0"),
    "constant": ("src=sums)", "src=ones)", "constant"),
}

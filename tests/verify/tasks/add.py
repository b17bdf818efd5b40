"""add: a + b."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def add(a, b):
    rows, columns = a.shape
    out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    for first in range(0, rows, ROWS):
        last = min(rows, first + ROWS)
        left = nl.load(a[first:last])
        right = nl.load(b[first:last])
        total = nl.ndarray(left.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=total, data1=left, data2=right, op=nl.add)
        nisa.dma_copy(dst=out[first:last], src=total)
    return out


def add_reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a + b


ARGUMENTS = ["f32[200,64]", "f32[200,64]"]
SLOW = ("ROWS = 128", "ROWS = 16")
WRONG = {
    "wrong operation": ("op=nl.add", "op=nl.subtract", "error"),
    "wrong rows": ("b[first:last]", "b[0 : last - first]", "error"),
    "missing last tile": ("range(0, rows, ROWS)", "range(0, rows - ROWS, ROWS)", "unwritten"),
    "precision": (
        "total = nl.ndarray(left.shape, dtype=nl.float32",
        "total = nl.ndarray(left.shape, dtype=nl.bfloat16",
        "error",
    ),
    "constant": (
        "nisa.tensor_tensor(dst=total, data1=left, data2=right, op=nl.add)",
        "nisa.memset(dst=total, value=1.0)",
        "constant",
    ),
    "unwritten output": ("nisa.dma_copy(dst=out[first:last], src=total)", "pass", "unwritten"),
    "copy of input": ("src=total)", "src=left)", "copy of argument 0"),
    "stored before computed": (
        "nisa.tensor_tensor(dst=total",
        "nisa.dma_copy(dst=out[first:last], src=total)\n        nisa.tensor_tensor(dst=total",
        "unwritten",
    ),
}

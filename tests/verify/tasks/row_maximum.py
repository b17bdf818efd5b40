"""row_maximum: the largest element of each row."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def row_maximum(x):
    rows = x.shape[0]
    out = nl.ndarray((rows, 1), dtype=x.dtype, buffer=nl.shared_hbm)
    for first in range(0, rows, ROWS):
        last = min(rows, first + ROWS)
        tile = nl.load(x[first:last])
        largest = nl.ndarray((last - first, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=largest, op=nl.maximum, data=tile, axis=1)
        nisa.dma_copy(dst=out[first:last], src=largest)
    return out


def row_maximum_reference(x: np.ndarray) -> np.ndarray:
    return x.max(axis=1, keepdims=True)


ARGUMENTS = ["f32[200,64]"]
SLOW = ("ROWS = 128", "ROWS = 16")
WRONG = {
    "minimum": ("op=nl.maximum", "op=nl.minimum", "error"),
    "first column": (
        "nisa.tensor_reduce(dst=largest, op=nl.maximum, data=tile, axis=1)",
        "nisa.tensor_copy(dst=largest, src=tile[:, 0:1])",
        "error",
    ),
    "without the last column": ("data=tile, axis=1", "data=tile[:, 0:63], axis=1", "error"),
    "never below zero": (
        "nisa.dma_copy(dst=out[first:last], src=largest)",
        "nisa.tensor_scalar(dst=largest, data=largest, op0=nl.maximum, operand0=1.9)\n"
        "        nisa.dma_copy(dst=out[first:last], src=largest)",
        "error",
    ),
    "precision": (
        "largest = nl.ndarray((last - first, 1), dtype=nl.float32",
        "largest = nl.ndarray((last - first, 1), dtype=nl.bfloat16",
        "error",
    ),
    "missing last tile": ("range(0, rows, ROWS)", "range(0, rows - ROWS, ROWS)", "unwritten"),
    "unwritten output": ("nisa.dma_copy(dst=out[first:last], src=largest)", "pass", "unwritten"),
    "wrong sign": ("data=tile, axis=1", "data=tile, axis=1, negate=True", "error"),
    "wrong shape": ("out = nl.ndarray((rows, 1)", "out = nl.ndarray((rows, 1, 1)", "shape|NKW"),
}

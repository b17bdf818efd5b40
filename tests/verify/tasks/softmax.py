"""softmax: exp(x) over its sum, along each row."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def softmax(x):
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    for first in range(0, rows, ROWS):
        last = min(rows, first + ROWS)
        tile = nl.load(x[first:last])
        bias = nl.ndarray((last - first, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=bias, op=nl.maximum, data=tile, axis=1, negate=True)
        powers = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((last - first, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=powers, op=nl.exp, data=tile, bias=bias)
        nisa.tensor_reduce(dst=total, op=nl.add, data=powers, axis=1)
        nisa.reciprocal(dst=total, data=total)
        nisa.tensor_scalar(dst=powers, data=powers, op0=nl.multiply, operand0=total)
        nisa.dma_copy(dst=out[first:last], src=powers)
    return out


def softmax_reference(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


ARGUMENTS = ["f32[200,64]"]
SLOW = ("ROWS = 128", "ROWS = 16")
WRONG = {
    "maximum not subtracted": ("data=tile, bias=bias)", "data=tile)", "large|NKW"),
    "sum without its last column": (
        "data=powers, axis=1",
        "data=powers[:, 0 : columns - 1], axis=1",
        "error",
    ),
    "maximum for the sum": ("op=nl.add", "op=nl.maximum", "error"),
    "not divided": (
        "nisa.tensor_scalar(dst=powers, data=powers, op0=nl.multiply, operand0=total)",
        "pass",
        "error",
    ),
    "missing last tile": ("range(0, rows, ROWS)", "range(0, rows - ROWS, ROWS)", "unwritten"),
    "precision": (
        "powers = nl.ndarray(tile.shape, dtype=nl.float32",
        "powers = nl.ndarray(tile.shape, dtype=nl.bfloat16",
        "error",
    ),
    "constant": (
        "nisa.dma_copy(dst=out[first:last], src=powers)",
        "nisa.memset(dst=powers, value=1 / 64)\n        nisa.dma_copy(dst=out[first:last], src=powers)",
        "constant",
    ),
    "unwritten output": ("nisa.dma_copy(dst=out[first:last], src=powers)", "pass", "unwritten"),
    "copy of input": ("src=powers)", "src=tile)", "copy of argument 0"),
}

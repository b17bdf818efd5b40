"""layernorm: each row less its mean, over its deviation."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def layernorm(x, eps):
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    for first in range(0, rows, ROWS):
        last = min(rows, first + ROWS)
        count = last - first
        tile = nl.load(x[first:last])
        mean = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=mean, op=nl.add, data=tile, axis=1)
        nisa.tensor_scalar(dst=mean, data=mean, op0=nl.multiply, operand0=1.0 / columns)
        centred = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=centred, data=tile, op0=nl.subtract, operand0=mean)
        squares = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=squares, data1=centred, data2=centred, op=nl.multiply)
        variance = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=variance, op=nl.add, data=squares, axis=1)
        bias = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=bias, value=eps)
        nisa.activation(dst=variance, op=nl.rsqrt, data=variance, scale=1 / columns, bias=bias)
        nisa.tensor_scalar(dst=centred, data=centred, op0=nl.multiply, operand0=variance)
        nisa.dma_copy(dst=out[first:last], src=centred)
    return out


def layernorm_reference(x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt(np.mean(centred * centred, axis=1, keepdims=True) + eps)


ARGUMENTS = ["f32[200,64]", "1e-5"]
SLOW = ("ROWS = 128", "ROWS = 16")
WRONG = {
    "mean not subtracted": (
        "data=tile, op0=nl.subtract, operand0=mean",
        "data=tile, op0=nl.subtract, operand0=0.0",
        "error",
    ),
    "wrong scale": ("scale=1 / columns", "scale=1 / (columns - 1)", "error"),
    "mean without its last column": ("data=tile, axis=1", "data=tile[:, 0 : columns - 1], axis=1", "error"),
    "variance of the maximum": ("op=nl.add, data=squares", "op=nl.maximum, data=squares", "error"),
    "missing last tile": ("range(0, rows, ROWS)", "range(0, rows - ROWS, ROWS)", "unwritten"),
    "precision": (
        "squares = nl.ndarray(tile.shape, dtype=nl.float32",
        "squares = nl.ndarray(tile.shape, dtype=nl.bfloat16",
        "error",
    ),
    "unwritten output": ("nisa.dma_copy(dst=out[first:last], src=centred)", "pass", "unwritten"),
    "unwritten sum": ("nisa.tensor_reduce(dst=mean, op=nl.add, data=tile, axis=1)", "pass", "unwritten"),
    "copy of input": ("src=centred)", "src=tile)", "copy of argument 0"),
}

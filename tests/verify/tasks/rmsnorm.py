"""rmsnorm: each row over its root mean square, times a weight."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def rmsnorm(x, weight, eps):
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    for first in range(0, rows, ROWS):
        last = min(rows, first + ROWS)
        count = last - first
        tile = nl.load(x[first:last])
        weights = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=weights, src=weight.ap(pattern=[[0, count], [1, columns]]))
        result = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
        squares = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=tile, data2=tile, op=nl.multiply)
        nisa.tensor_reduce(dst=squares, op=nl.add, data=result, axis=1)
        bias = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=bias, value=eps)
        nisa.activation(dst=squares, op=nl.rsqrt, data=squares, scale=1.0 / columns, bias=bias)
        nisa.scalar_tensor_tensor(
            dst=result, data=tile, op0=nl.multiply, operand0=squares, op1=nl.multiply, operand1=weights
        )
        nisa.dma_copy(dst=out[first:last], src=result)
    return out


def rmsnorm_reference(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps) * weight


ARGUMENTS = ["f32[200,64]", "f32[1,64]", "1e-5"]
SLOW = ("ROWS = 128", "ROWS = 16")
WRONG = {
    "wrong scale": ("scale=1.0 / columns", "scale=1.0 / ROWS", "error"),
    "eps forgotten": ("value=eps", "value=0.0", "zeros|slope"),
    "no square root": ("op=nl.rsqrt", "op=nl.reciprocal", "error|NKW"),
    "sum without its last column": (
        "data=result, axis=1",
        "data=result[:, 0 : columns - 1], axis=1",
        "error",
    ),
    "missing last tile": ("range(0, rows, ROWS)", "range(0, rows - ROWS, ROWS)", "unwritten"),
    "precision": (
        "result = nl.ndarray(tile.shape, dtype=nl.float32",
        "result = nl.ndarray(tile.shape, dtype=nl.bfloat16",
        "error",
    ),
    "weight forgotten": ("operand1=weights", "operand1=tile", "error"),
    "unwritten output": ("nisa.dma_copy(dst=out[first:last], src=result)", "pass", "unwritten"),
    "copy of input": ("src=result)", "src=tile)", "copy of argument 0"),
}

"""matmul: a.T @ b; the contraction is the rows of both."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def matmul(a, b):
    depth, rows = a.shape
    columns = b.shape[1]
    assert rows <= 128 and columns <= 512, "matmul takes at most 128 columns of a and 512 of b"
    sums = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)
    for first in range(0, depth, ROWS):
        last = min(depth, first + ROWS)
        left = nl.load(a[first:last])
        right = nl.load(b[first:last])
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=first > 0)
    result = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=sums)
    out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=result)
    return out


def matmul_reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.T @ b


ARGUMENTS = ["f32[300,64]", "f32[300,96]"]
SLOW = ("ROWS = 128", "ROWS = 32")
WRONG = {
    "first flag forgotten": ("accumulate=first > 0", "accumulate=True", "unwritten|error|NKW"),
    "never accumulated": ("accumulate=first > 0", "accumulate=False", "error"),
    "missing last tile": ("range(0, depth, ROWS)", "range(0, depth - ROWS, ROWS)", "error"),
    "off by one row": ("b[first:last]", "b[max(first - 1, 0) : max(first - 1, 0) + last - first]", "error"),
    "operands of two dtypes": (
        "left = nl.load(a[first:last])",
        "left = nl.load(a[first:last], dtype=nl.bfloat16)",
        "error|NKW",
    ),
    "precision of the result": (
        "result = nl.ndarray((rows, columns), dtype=nl.float32",
        "result = nl.ndarray((rows, columns), dtype=nl.bfloat16",
        "error",
    ),
    "wrong scale": (
        "nisa.tensor_copy(dst=result, src=sums)",
        "nisa.activation(dst=result, op=nl.copy, data=sums, scale=1.01)",
        "error",
    ),
    "constant": ("nisa.tensor_copy(dst=result, src=sums)", "nisa.memset(dst=result, value=2.0)", "constant"),
    "unwritten output": ("nisa.dma_copy(dst=out, src=result)", "pass", "unwritten"),
    "copied before computed": (
        "    for first in",
        "    early = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    nisa.tensor_copy(dst=early, src=sums)\n    for first in",
        "unwritten",
    ),
}

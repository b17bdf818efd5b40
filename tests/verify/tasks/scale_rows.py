"""scale_rows: each row of x times its own factor."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def scale_rows(x, factors):
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    for first in range(0, rows, ROWS):
        last = min(rows, first + ROWS)
        tile = nl.load(x[first:last])
        factor = nl.load(factors[first:last])
        scaled = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=scaled, data=tile, op0=nl.multiply, operand0=factor)
        nisa.dma_copy(dst=out[first:last], src=scaled)
    return out


def scale_rows_reference(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return x * factors


ARGUMENTS = ["f32[200,64]", "f32[200,1]"]
SLOW = ("ROWS = 128", "ROWS = 16")
WRONG = {
    "factors of the first rows": ("factors[first:last]", "factors[0 : last - first]", "error"),
    "off by one row": ("x[first:last]", "x[max(first - 1, 0) : max(first - 1, 0) + last - first]", "error"),
    "missing last tile": ("range(0, rows, ROWS)", "range(0, rows - ROWS, ROWS)", "unwritten"),
    "factors forgotten": ("operand0=factor", "operand0=1.0", "copy of argument 0"),
    "precision": (
        "scaled = nl.ndarray(tile.shape, dtype=nl.float32",
        "scaled = nl.ndarray(tile.shape, dtype=nl.bfloat16",
        "error",
    ),
    "constant": (
        "nisa.tensor_scalar(dst=scaled, data=tile, op0=nl.multiply, operand0=factor)",
        "nisa.memset(dst=scaled, value=0.5)",
        "constant",
    ),
    "unwritten output": ("nisa.dma_copy(dst=out[first:last], src=scaled)", "pass", "unwritten"),
    "half of the columns": ("dst=scaled, data=tile", "dst=scaled[:, 0:32], data=tile[:, 0:32]", "unwritten"),
}

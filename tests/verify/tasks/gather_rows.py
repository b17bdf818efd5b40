"""gather_rows: the rows of a table that indices name."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def gather_rows(indices, table):
    count = indices.shape[0]
    width = table.shape[1]
    out = nl.ndarray((count, width), dtype=table.dtype, buffer=nl.shared_hbm)
    for first in range(0, count, ROWS):
        last = min(count, first + ROWS)
        numbers = nl.load(indices[first:last])
        gathered = nl.ndarray((last - first, width), dtype=table.dtype, buffer=nl.sbuf)
        source = table.ap(pattern=[[width, last - first], [1, width]], vector_offset=numbers)
        nisa.dma_copy(dst=gathered, src=source)
        nisa.dma_copy(dst=out[first:last], src=gathered)
    return out


def gather_rows_reference(indices: np.ndarray, table: np.ndarray) -> np.ndarray:
    return table[indices[:, 0]]


ARGUMENTS = ["i32[160,1]", "f32[200,64]"]
SLOW = ("ROWS = 128", "ROWS = 16")
WRONG = {
    "indices ignored": ("src=source)", "src=table[first:last])", "error"),
    "indices of the first rows": ("indices[first:last]", "indices[0 : last - first]", "error"),
    "always the first row": (
        "src=source)",
        "src=table.ap(pattern=[[0, last - first], [1, width]]))",
        "error",
    ),
    "half of each row": (
        "nisa.dma_copy(dst=out[first:last], src=gathered)",
        "nisa.dma_copy(dst=out[first:last, 0:32], src=gathered[:, 0:32])",
        "unwritten",
    ),
    "missing last tile": ("range(0, count, ROWS)", "range(0, count - ROWS, ROWS)", "unwritten"),
    "constant": (
        "nisa.dma_copy(dst=gathered, src=source)",
        "nisa.memset(dst=gathered, value=1.0)",
        "constant",
    ),
    "unwritten output": ("nisa.dma_copy(dst=out[first:last], src=gathered)", "pass", "unwritten"),
    "precision": (
        "gathered = nl.ndarray((last - first, width), dtype=table.dtype",
        "gathered = nl.ndarray((last - first, width), dtype=nl.bfloat16",
        "error",
    ),
    "columns of the first half twice": (
        "pattern=[[width, last - first], [1, width]], vector",
        "pattern=[[width, last - first], [1, width // 2], [0, 2]], vector",
        "error|NKW",
    ),
}

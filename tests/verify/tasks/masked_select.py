"""masked_select: a where the mask is 1, else b."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def masked_select(mask, a, b):
    rows, columns = a.shape
    out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    for first in range(0, rows, ROWS):
        last = min(rows, first + ROWS)
        chosen = nl.load(b[first:last])
        replacement = nl.load(a[first:last])
        masks = nl.load(mask[first:last])
        predicate = nl.ndarray(masks.shape, dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=predicate, data=masks, op0=nl.greater, operand0=0.0)
        nisa.tensor_copy_predicated(dst=chosen, src=replacement, predicate=predicate)
        nisa.dma_copy(dst=out[first:last], src=chosen)
    return out


def masked_select_reference(mask: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(mask > 0, a, b)


ARGUMENTS = ["f32[200,64]", "f32[200,64]", "f32[200,64]"]
SLOW = ("ROWS = 128", "ROWS = 16")
WRONG = {
    "mask reversed": ("predicate=predicate", "predicate=predicate, reverse_pred=True", "error"),
    "zero counts as true": ("op0=nl.greater", "op0=nl.greater_equal", "half zeros: error"),
    "wrong threshold": ("operand0=0.0", "operand0=0.01", "error"),
    "mask of the first rows": ("mask[first:last]", "mask[0 : last - first]", "error"),
    "mask ignored": (
        "nisa.tensor_copy_predicated(dst=chosen, src=replacement, predicate=predicate)",
        "pass",
        "copy of argument 2",
    ),
    "missing last tile": ("range(0, rows, ROWS)", "range(0, rows - ROWS, ROWS)", "unwritten"),
    "precision": (
        "others = nl.load(a[first:last])",
        "others = nl.load(a[first:last], dtype=nl.bfloat16)",
        "error|NKW",
    ),
    "unwritten output": ("nisa.dma_copy(dst=out[first:last], src=chosen)", "pass", "unwritten"),
    "copy of input": ("src=chosen)", "src=replacement)", "copy of argument 1"),
}

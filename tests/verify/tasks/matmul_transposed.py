"""matmul_transposed: a @ b.T; both operands are transposed on the Tensor engine."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def matmul_transposed(a, b):
    rows, depth = a.shape
    columns = b.shape[0]
    assert max(rows, depth, columns) <= ROWS, f"matmul_transposed takes at most {ROWS} of each extent"
    turned = []
    for source in (a, b):
        tile = nl.load(source)
        bank = nl.ndarray((depth, source.shape[0]), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=tile)
        copied = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=copied, src=bank)
        turned.append(copied)
    sums = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=turned[0], moving=turned[1])
    result = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=sums)
    out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=result)
    return out


def matmul_transposed_reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a @ b.T


ARGUMENTS = ["f32[64,100]", "f32[64,100]"]
SLOW = (
    "    nisa.dma_copy(dst=out, src=result)",
    "    for row in range(rows):\n        nisa.dma_copy(dst=out[row : row + 1], src=result[row : row + 1])",
)
WRONG = {
    "wrong order of operands": (
        "stationary=turned[0], moving=turned[1]",
        "stationary=turned[1], moving=turned[0]",
        "error",
    ),
    "one operand twice": ("moving=turned[1]", "moving=turned[0]", "error"),
    "depth without its last row": (
        "stationary=turned[0], moving=turned[1]",
        "stationary=turned[0][0 : depth - 1], moving=turned[1][0 : depth - 1]",
        "error",
    ),
    "precision": (
        "copied = nl.ndarray(bank.shape, dtype=nl.float32",
        "copied = nl.ndarray(bank.shape, dtype=nl.bfloat16",
        "error",
    ),
    "missing last row": (
        "nisa.dma_copy(dst=out, src=result)",
        "nisa.dma_copy(dst=out[0 : rows - 1], src=result[0 : rows - 1])",
        "unwritten",
    ),
    "result not copied": ("nisa.tensor_copy(dst=result, src=sums)", "pass", "unwritten"),
    "constant": ("nisa.tensor_copy(dst=result, src=sums)", "nisa.memset(dst=result, value=0.0)", "constant"),
    "wrong scale": (
        "nisa.tensor_copy(dst=result, src=sums)",
        "nisa.activation(dst=result, op=nl.copy, data=sums, scale=0.1)",
        "error",
    ),
}

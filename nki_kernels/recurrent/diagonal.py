"""Vectors of channels as columns and as diagonals, which a matmul multiplies by.

`causal_conv1d` and `selective_scan` multiply every channel by a weight of its own: tokens on the free dim and
channels on the partitions, or by a matmul with a diagonal matrix. In a shape [c in block, block, ...] channel
block * 128 + c is on partition c.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.row_groups import allocate_transposed
from nki_kernels.tiles import identity, transpose_into


def load_columns(arrays, panel, dtype):
    """Load columns (left, right) of arrays [n, C] of HBM, transposed: a float32 SBUF tile [c in block, block, row].

    The n rows of all arrays follow one another. Values are first rounded to `dtype`.

    Args:
        arrays: a tuple of the arrays.
        panel: (left, right).
    """
    left, right = panel
    count = 0
    for array in arrays:
        count += array.shape[0]
    # DMAs cast, and put rows on partitions that engines do not begin at.
    raw = nl.ndarray((count, right - left), dtype=dtype, buffer=nl.sbuf)
    first = 0
    for array in arrays:
        nisa.dma_copy(dst=raw[first : first + array.shape[0], :], src=array[:, left:right])
        first += array.shape[0]
    result = allocate_transposed(right - left, count, nl.float32)
    transpose_into(result, 0, 0, raw)
    return result


def build_diagonals(columns, dtype):
    """Return columns [c in block, block, row] as diagonal matrices, a new SBUF tile [c in block, block, row, c]."""
    height, count, rows = columns.shape
    ones = identity(height, nl.float32)
    result = nl.ndarray((height, count, rows, height), dtype=dtype, buffer=nl.sbuf)
    for block in range(count):
        nisa.tensor_tensor(
            dst=result[:, block, :, :],
            data1=ones.expand_dim(1).broadcast(1, rows),
            data2=columns[:, block, :].expand_dim(2).broadcast(2, height),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )
    return result

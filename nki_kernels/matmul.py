"""matmul: c = a @ b, for matrices of any size.

Dimensions
    M   rows of a and c; N columns of b and c; K the contraction.

Arguments
    a             [M, K] @ HBM, float32 or bfloat16; [K, M] with a_transposed
    b             [K, N] @ HBM, float32 or bfloat16; read in a's dtype
    a_transposed  compile-time bool: a is given with the contraction first, which saves its transposes
    returns c     [M, N] @ HBM, a's dtype

Layout
    The Tensor engine contracts over partitions, so both operands lie with K on the partitions, in blocks of 128: b
    comes that way from HBM, a is transposed on the Tensor engine. c has rows on the partitions, as it lies in HBM.

Tiling
    for R rows of a, which stay in SBUF as [128, K/128, rows]: 512 for K up to 4096, beyond the
    multiple of 128 that keeps [K/128, R] within 16384 elements
        for 512 columns of b (2048 if there are at most 128 rows), which accumulate in 4 PSUM banks
            for K, in weight tiles [128, blocks, columns] of 32 KiB per partition, each read once by one DMA
                one nc_matmul for each block, 128 rows and 512 columns

Limits
    K up to 16384: a row tile [128, K] and its transpose must fit into SBUF.

Cost
    HBM: a once, b ceil(M / R) times, c once. Tensor engine: M/128 * K/128 * N/512 matmuls of 512 columns, four
    passes each in float32. Bound: HBM up to some hundred rows (bfloat16), the Tensor engine beyond.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.precision import widened
from nki_kernels.tiles import (
    PARTITIONS,
    columns_at_once,
    expect_dims,
    load_blocks,
    load_transposed,
    multiply,
    rows_at_once,
)

MAX_CONTRACTION = 16384


@nki.jit
def matmul(a, b, a_transposed=False):
    """c = a @ b, for matrices of any size."""
    expect_dims(2, a, "a [M, K]")
    expect_dims(2, b, "b [K, N]")
    depth = a.shape[0] if a_transposed else a.shape[1]
    total_rows = a.shape[1] if a_transposed else a.shape[0]
    total_columns = b.shape[1]
    assert b.shape[0] == depth, f"matmul contracts {depth} columns of a with {b.shape[0]} rows of b"
    assert depth <= MAX_CONTRACTION, f"matmul contracts at most {MAX_CONTRACTION}, not {depth}"
    c = nl.ndarray((total_rows, total_columns), dtype=a.dtype, buffer=nl.shared_hbm)
    step = rows_at_once(depth)
    for first in range(0, total_rows, step):
        rows = min(step, total_rows - first)
        if a_transposed:
            a_blocks = load_blocks(a[:, first : first + rows], a.dtype)
        else:
            a_blocks = load_transposed(a, first, rows)
        width = columns_at_once(rows)
        for column in range(0, total_columns, width):
            last = min(total_columns, column + width)
            sums = multiply(a_blocks, b[:, column:last])
            for tile in range(len(sums)):
                result = nl.ndarray(sums[tile].shape, dtype=a.dtype, buffer=nl.sbuf)
                nisa.tensor_copy(dst=result, src=sums[tile])
                row = first + tile * PARTITIONS
                nisa.dma_copy(dst=c[row : row + result.shape[0], column:last], src=result)
    return c


def matmul_reference(a: np.ndarray, b: np.ndarray, a_transposed: bool = False) -> np.ndarray:
    """numpy's product in float32."""
    left = widened(a).T if a_transposed else widened(a)
    return (left @ widened(b)).astype(a.dtype)

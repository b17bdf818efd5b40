"""qkv_projection: queries, keys and values of a layer, with the RMSNorm before them fused in.

    [q | k | v] = rmsnorm(x, norm_weight, eps) @ w_qkv

Dimensions
    T   tokens; H hidden size; Q and KV widths of queries and of keys (and values): heads times head size.

Arguments
    x            [T, H] @ HBM, float32 or bfloat16
    norm_weight  [1, H] @ HBM, float32 or bfloat16
    w_qkv        [H, Q + 2 KV] @ HBM, float32 or bfloat16; read in x's dtype
    eps          compile-time float
    q_size       compile-time int, Q
    kv_size      compile-time int, KV
    returns q    [T, Q] @ HBM, x's dtype
            k    [T, KV] @ HBM, x's dtype
            v    [T, KV] @ HBM, x's dtype

Layout
    Rows of x on the partitions for the norm; then transposed, with H on the partitions, for the product.

Tiling
    As matmul: up to R normalised rows stay in SBUF, and the weight is read once for each R rows; 512 to 2048 columns
    accumulate in PSUM at a time. R is 512 for H up to 4096, 384 up to 5376, 256 beyond. A column range that spans two
    outputs is stored in two pieces.

Limits
    H up to 8192.

Cost
    HBM: the weight ceil(T / R) times, x and the outputs once, min(T, 128) times the norm's weight. Bound: reading the
    weight, up to some hundred rows.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.precision import widened
from nki_kernels.rmsnorm import MAX_HIDDEN, rmsnorm_reference
from nki_kernels.tiles import (
    PARTITIONS,
    columns_at_once,
    expect_dims,
    load_repeated,
    load_transposed,
    multiply,
    rows_at_once,
)


@nki.jit
def qkv_projection(x, norm_weight, w_qkv, eps, q_size, kv_size):
    """Queries, keys and values of the normalised rows."""
    expect_dims(2, x, "x [T, H]")
    tokens, hidden = x.shape
    width = q_size + 2 * kv_size
    assert hidden <= MAX_HIDDEN, f"qkv_projection takes a hidden size of at most {MAX_HIDDEN}, not {hidden}"
    assert norm_weight.shape == (1, hidden), f"norm_weight is [1, {hidden}], not {norm_weight.shape}"
    assert w_qkv.shape == (hidden, width), f"w_qkv is [{hidden}, {q_size} + 2 * {kv_size}], not {w_qkv.shape}"
    q = nl.ndarray((tokens, q_size), dtype=x.dtype, buffer=nl.shared_hbm)
    k = nl.ndarray((tokens, kv_size), dtype=x.dtype, buffer=nl.shared_hbm)
    v = nl.ndarray((tokens, kv_size), dtype=x.dtype, buffer=nl.shared_hbm)
    weights = load_repeated(norm_weight, min(tokens, PARTITIONS))
    step = rows_at_once(hidden)
    for first in range(0, tokens, step):
        rows = min(step, tokens - first)
        x_blocks = load_transposed(x, first, rows, weights, eps)
        span = columns_at_once(rows)
        for column in range(0, width, span):
            last = min(width, column + span)
            sums = multiply(x_blocks, w_qkv[:, column:last])
            for tile in range(len(sums)):
                result = nl.ndarray(sums[tile].shape, dtype=x.dtype, buffer=nl.sbuf)
                nisa.tensor_copy(dst=result, src=sums[tile])
                row = first + tile * PARTITIONS
                store_columns(q, 0, row, result, column)
                store_columns(k, q_size, row, result, column)
                store_columns(v, q_size + kv_size, row, result, column)
    return q, k, v


def store_columns(output, output_column, row, tile, tile_column):
    """Store the columns that a tile shares with an output, both placed in one wide matrix by their first column."""
    rows, columns = tile.shape
    start = max(output_column, tile_column)
    end = min(output_column + output.shape[1], tile_column + columns)
    if start < end:
        nisa.dma_copy(
            dst=output[row : row + rows, start - output_column : end - output_column],
            src=tile[:, start - tile_column : end - tile_column],
        )


def qkv_projection_reference(
    x: np.ndarray, norm_weight: np.ndarray, w_qkv: np.ndarray, eps: float, q_size: int, kv_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Norm, product and split in float32."""
    product = (rmsnorm_reference(widened(x), norm_weight, eps) @ widened(w_qkv)).astype(x.dtype)
    return product[:, :q_size], product[:, q_size : q_size + kv_size], product[:, q_size + kv_size :]

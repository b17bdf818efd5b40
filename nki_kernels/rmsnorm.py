"""rmsnorm: each row divided by its root mean square, times a weight.

    y[t, h] = x[t, h] / sqrt(mean over h of x[t, h]^2 + eps) * weight[h]

Dimensions
    T   rows (tokens); H elements of a row (the hidden size).

Arguments
    x          [T, H] @ HBM, float32 or bfloat16
    weight     [1, H] @ HBM, float32 or bfloat16
    eps        compile-time float
    returns y  [T, H] @ HBM, x's dtype

Layout
    Rows on the partitions, so that the sum over h runs along the free dim, on the Scalar engine while it squares. The
    weight is needed on every partition and is read from HBM once for each (a stride of 0).

Tiling
    for 128 rows: load, square and sum, rsqrt, scale and weigh in one pass, store.

Limits
    H up to 8192: a row tile, the weight and the result lie in SBUF together.

Cost
    HBM: x once, y once, min(T, 128) times the weight. Four instructions and two DMAs for 128 rows. Bound: DMA.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.precision import widened
from nki_kernels.tiles import PARTITIONS, expect_dims, load, load_repeated, rms_normalised

MAX_HIDDEN = 8192


@nki.jit
def rmsnorm(x, weight, eps):
    """Each row divided by its root mean square, times a weight."""
    expect_dims(2, x, "x [T, H]")
    tokens, hidden = x.shape
    assert weight.shape == (1, hidden), f"weight is [1, {hidden}] for rows of {hidden}, not {weight.shape}"
    assert hidden <= MAX_HIDDEN, f"rmsnorm takes rows of at most {MAX_HIDDEN}, not {hidden}"
    y = nl.ndarray((tokens, hidden), dtype=x.dtype, buffer=nl.shared_hbm)
    weights = load_repeated(weight, min(tokens, PARTITIONS))
    for first in range(0, tokens, PARTITIONS):
        last = min(tokens, first + PARTITIONS)
        tile = load(x[first:last, :], x.dtype)
        nisa.dma_copy(dst=y[first:last, :], src=rms_normalised(tile, weights[0 : last - first, :], eps))
    return y


def rmsnorm_reference(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """The formula in float32."""
    wide = widened(x)
    scale = 1 / np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + wide.dtype.type(eps))
    return (wide * scale * widened(weight)).astype(x.dtype)

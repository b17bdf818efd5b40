"""Quantise two matrices to MXFP8 and multiply them."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def quantised_matmul(stationary, moving):
    """Return stationary.T @ moving, both bfloat16 [K, columns * 4] with four rows of K side by side."""
    quantised = []
    for source in (stationary, moving):
        rows, columns = source.shape
        packed = nl.ndarray((rows, columns // 4), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf)
        scale = nl.ndarray((rows, columns // 4), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.quantize_mx(dst=packed, src=nl.load(source), dst_scale=scale)
        quantised.append((packed, scale))
    (packed_stationary, stationary_scale), (packed_moving, moving_scale) = quantised
    total = nl.ndarray((packed_stationary.shape[1], packed_moving.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul_mx(
        dst=total,
        stationary=packed_stationary,
        moving=packed_moving,
        stationary_scale=stationary_scale,
        moving_scale=moving_scale,
    )
    tile = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=total)
    out = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


rng = np.random.default_rng(0)
stationary, moving = (rng.integers(-8, 9, (32, 4 * width)).astype(nl.bfloat16) for width in (16, 8))
unpacked = [np.float32(matrix).reshape(32, -1, 4) for matrix in (stationary, moving)]
expected = np.einsum("kmq,knq->mn", *unpacked)  # small integers are exact in MXFP8
np.testing.assert_array_equal(quantised_matmul(stationary, moving), expected)

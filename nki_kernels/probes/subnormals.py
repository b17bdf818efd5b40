"""Products of subnormal fp8 numbers, whose values tell whether the Tensor engine keeps subnormals.

The byte n read as float8_e4m3 is n * 2^-9 for n from 0 to 15, and subnormal for n from 1 to 7. A chip that keeps
subnormals returns all products as the references do. A chip that flushes them returns 0 in rows, in columns, or in
both, 1 to 7: those of the operand that it flushes.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def multiply_subnormals(codes):
    """Return the products of 16 codes as stationary, as moving, and as both operands of a matmul.

    Args:
        codes: Bytes [1, 16] @ HBM, uint8, read as float8_e4m3.

    Returns:
        float32 [3, 16, 16] in shared HBM. First codes by rows beside bfloat16 ones, then by columns beside bfloat16
        ones, then the products of all pairs of codes.
    """
    numbers = load_codes(codes, 1)
    ones = nl.ndarray(codes.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    count = codes.shape[1]
    products = nl.ndarray((3, count, count), dtype=nl.float32, buffer=nl.shared_hbm)
    store_product(products[0], numbers[:, 0, :], ones)
    store_product(products[1], ones, numbers[:, 0, :])
    store_product(products[2], numbers[:, 0, :], numbers[:, 0, :])
    return products


@nki.jit
def multiply_subnormal_pairs(codes):
    """Return the sums of two equal products of codes, which a matmul in the mode double_row adds; gen3 and later.

    Args:
        codes: Bytes [1, 16] @ HBM, uint8, read as float8_e4m3.

    Returns:
        float32 [16, 16] in shared HBM, twice the products of all pairs of codes.
    """
    numbers = load_codes(codes, 2)
    products = nl.ndarray((codes.shape[1], codes.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    store_product(products, numbers, numbers, nisa.matmul_perf_mode.double_row)
    return products


def load_codes(codes, copies):
    """Load bytes [1, n] of HBM `copies` times; returns them as a tile [1, copies, n] of float8_e4m3 in SBUF."""
    count = codes.shape[1]
    tile = nl.ndarray((1, copies, count), dtype=codes.dtype, buffer=nl.sbuf)
    for copy in range(copies):
        nisa.dma_copy(dst=tile[:, copy, :], src=codes)
    return tile.view(nl.float8_e4m3)


def store_product(destination, stationary, moving, perf_mode=nisa.matmul_perf_mode.none):
    """Multiply two tiles by one matmul and store the float32 product [M, N] to `destination` in HBM."""
    bank = nl.ndarray(destination.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=bank, stationary=stationary, moving=moving, perf_mode=perf_mode)
    rows = nl.ndarray(destination.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rows, src=bank)
    nisa.dma_copy(dst=destination, src=rows)


def multiply_subnormals_reference(codes):
    """Return what `multiply_subnormals` returns for codes below 16 on a chip that keeps subnormals."""
    numbers = codes[0].astype(np.float32) / 512
    ones = np.ones_like(numbers)
    return np.stack([np.outer(numbers, ones), np.outer(ones, numbers), np.outer(numbers, numbers)])


def multiply_subnormal_pairs_reference(codes):
    """Return what `multiply_subnormal_pairs` returns for codes below 16 on a chip that keeps subnormals."""
    numbers = codes[0].astype(np.float32) / 512
    return 2 * np.outer(numbers, numbers)

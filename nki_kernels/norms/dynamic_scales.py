"""Dynamic quantisation of rows: each row of a tile in SBUF becomes numbers of 8 bits and one scale.

scale = the row's largest magnitude / limit, with the limit 127 of int8 or 240 of float8_e4m3, and number =
round(x * limit / the largest magnitude), to nearest, ties to even; so a row is about its numbers times its scale. Rows
lie on partitions, as a norm leaves them, so that scales are columns, which instructions multiply by as they are.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

INT8_LIMIT = 127.0
FP8_LIMIT = 240.0
"""Largest finite number of float8_e4m3."""
LEAST_MAGNITUDE = 2.0**-100
"""Magnitude that a row has at least for its scale, so that a row of zeros becomes zeros and no NaN."""


def quantize_rows_to_int8(rows):
    """Return integers from -127 to 127 as a new bfloat16 tile of the shape of `rows`, and float32 scales [row, 1].

    rows: float32 or bfloat16 SBUF tile [row, n], finite. The integers pass through int8, which rounds them.
    """
    factors, scales = compute_scales(rows, INT8_LIMIT)
    integers = nl.ndarray(rows.shape, dtype=nl.int8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=integers, data=rows, op0=nl.multiply, operand0=factors)
    numbers = nl.ndarray(rows.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=numbers, src=integers)
    return numbers, scales


def quantize_rows_to_fp8(rows):
    """Return rows in a new float8_e4m3 tile of the shape of `rows`, largest magnitude 240, and float32 scales [row, 1].

    rows: float32 or bfloat16 SBUF tile [row, n], finite.
    """
    factors, scales = compute_scales(rows, FP8_LIMIT)
    numbers = nl.ndarray(rows.shape, dtype=nl.float8_e4m3, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=numbers, data=rows, op0=nl.multiply, operand0=factors)
    return numbers, scales


def compute_scales(rows, limit):
    """Return float32 columns [row, 1] in SBUF for a tile [row, n]: limit / largest magnitude, and its inverse."""
    count = rows.shape[0]
    magnitudes = nl.ndarray(rows.shape, dtype=rows.dtype, buffer=nl.sbuf)
    largest = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar_reduce(
        dst=magnitudes, data=rows, op0=nl.abs, operand0=0.0, reduce_op=nl.maximum, reduce_res=largest
    )
    nisa.tensor_scalar(dst=largest, data=largest, op0=nl.maximum, operand0=LEAST_MAGNITUDE)
    factors = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=factors, data=largest)
    nisa.tensor_scalar(dst=factors, data=factors, op0=nl.multiply, operand0=limit)
    scales = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=scales, data=largest, op0=nl.multiply, operand0=1.0 / limit)
    return factors, scales


def quantized_rows_reference(rows, limit, dtype):
    """Return numbers of `dtype` and float32 scales [row, 1] of rows [row, n], as the functions above define them.

    limit and dtype: 127 and int8, or 240 and float8_e4m3. Every operation rounds to float32.
    """
    wide = rows.astype(np.float32)
    largest = np.maximum(np.abs(wide).max(axis=1, keepdims=True), np.float32(LEAST_MAGNITUDE))
    factors = np.float32(1) / largest * np.float32(limit)
    scales = largest * np.float32(1 / limit)
    products = wide * factors
    numbers = np.rint(products) if np.dtype(dtype) == np.int8 else products
    return numbers.astype(dtype), scales

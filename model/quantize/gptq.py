"""GPTQ: rounds a weight column by column, and moves each column's error to the columns after it.

The sum of squared errors of the products with calibration rows is H = x.T @ x between errors of two columns. Rounding
a column by e changes the following columns by -e times their row of the upper Cholesky factor of H's inverse
(Frantar and others, arXiv 2210.17323, algorithm 1).
"""

from __future__ import annotations

import numpy as np

from model.errors import ModelError
from model.quantize.rounding import Rounded, choose_scales, round_to_levels, spread
from model.quantize.schemes import Scheme

DAMPING = 0.01
"""Part of the mean of H's diagonal that is added to the diagonal."""
_BLOCK = 128
"""Columns whose errors are collected before the columns after them are changed."""


def round_with_products(
    weight: np.ndarray,
    products: np.ndarray,
    scheme: Scheme,
    scale_dtype: np.dtype,
    damping: float = DAMPING,
    orders_columns: bool = False,
) -> Rounded:
    """Return a weight [out, in] rounded by GPTQ to integers.

    Args:
        weight: Finite float32 numbers.
        products: H, float32 [in, in]. Columns without inputs, with a diagonal of 0, are rounded to nearest.
        scheme: The integer format, and the group. Scales are those of the original weight.
        scale_dtype: Dtype of the stored scales.
        damping: Part of the mean diagonal that is added.
        orders_columns: Round columns with the largest diagonal first (activation order). The elements stay in place.

    Raises:
        ModelError: The damped H has no Cholesky factor.
    """
    columns = weight.shape[1]
    scales = choose_scales(weight, scheme, scale_dtype)
    order = np.argsort(-np.diagonal(products), kind="stable") if orders_columns else np.arange(columns)
    factor = _factorise(products[np.ix_(order, order)].astype(np.float64), damping)
    # Columns of the weight are rows here, so that they are contiguous.
    remaining = np.ascontiguousarray(weight.T[order], dtype=np.float64)
    ordered_scales = np.ascontiguousarray(spread(scales, columns).T[order], dtype=np.float64)
    elements = np.empty(remaining.shape, np.int8)
    for first in range(0, columns, _BLOCK):
        end = min(first + _BLOCK, columns)
        errors = np.empty((end - first, len(weight)))
        for column in range(first, end):
            scale = ordered_scales[column]
            elements[order[column]] = round_to_levels(remaining[column] / scale, scheme.numbers)
            error = (remaining[column] - elements[order[column]] * scale) / factor[column, column]
            remaining[column + 1 : end] -= factor[column, column + 1 : end, None] * error
            errors[column - first] = error
        remaining[end:] -= factor[first:end, end:].T @ errors
    return Rounded(np.ascontiguousarray(elements.T), scales)


def _factorise(products: np.ndarray, damping: float) -> np.ndarray:
    """Return the upper Cholesky factor of the inverse of the damped products, float64 [in, in]."""
    diagonal = np.diagonal(products).copy()
    diagonal[diagonal == 0] = 1
    damped = products.copy()
    np.fill_diagonal(damped, diagonal + damping * diagonal.mean())
    try:
        return np.linalg.cholesky(np.linalg.inv(damped)).T
    except np.linalg.LinAlgError:
        raise ModelError(
            f"the inputs of a weight with {len(products)} columns are too alike for --damping {damping}: give a longer "
            "--calibration text or a larger --damping"
        ) from None

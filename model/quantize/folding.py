"""Scales of columns that are folded into the norm before linear weights: AWQ and SmoothQuant.

A column of the weights is multiplied by s and the norm's weight divided by s, which changes no product. AWQ makes
columns with large inputs large, so that they are rounded relatively less (Lin and others, arXiv 2306.00978).
SmoothQuant makes columns with large inputs large in the weights and small in the rows, so that rows of 8 bits lose less
(Xiao and others, arXiv 2211.10438).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from model.quantize.calibration import InputStatistics

STRENGTH = 0.5
"""Exponent of SmoothQuant's inputs; weights have 1 - STRENGTH."""
AWQ_STEPS = 20
"""Exponents of the inputs from 0 to 1 that AWQ compares."""
_LEAST_MAGNITUDE = 1e-4
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-10, 2.0**10


def choose_smoothing(weights: Sequence[np.ndarray], inputs: InputStatistics) -> np.ndarray:
    """Return SmoothQuant's factors of columns, float32 [in].

    A factor is the largest input to the power of `STRENGTH` over the largest weight to the power of 1 - `STRENGTH`.

    Args:
        weights: All weights [out, in] that read the norm.
        inputs: Statistics of the rows.
    """
    largest = np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0)
    largest_inputs = np.maximum(inputs.largest, _LEAST_MAGNITUDE)
    factors = largest_inputs**STRENGTH / np.maximum(largest, _LEAST_MAGNITUDE) ** (1 - STRENGTH)
    return np.clip(factors, _LEAST_SCALE, _LARGEST_SCALE).astype(np.float32)


def search_factors(
    weights: Sequence[np.ndarray],
    inputs: InputStatistics,
    round_weight: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return AWQ's factors of columns, float32 [in]: the mean magnitude of inputs to the best of 20 powers.

    The best power has the least squared error of the products with calibration rows; ties go to the smaller power.

    Args:
        weights: Weights [out, in] that read the norm and are rounded.
        inputs: Statistics of the rows, with their products.
        round_weight: Function that returns the numbers of a rounded weight.
    """
    means = np.maximum(inputs.sums / max(1, inputs.rows), _LEAST_MAGNITUDE).astype(np.float32)
    best, least = np.ones_like(means), np.inf
    for step in range(AWQ_STEPS):
        factors = means ** np.float32(step / AWQ_STEPS)
        factors /= np.sqrt(factors.max() * factors.min())
        factors = np.clip(factors, _LEAST_SCALE, _LARGEST_SCALE)
        error = sum(
            measure_product_error(weight, round_weight(weight * factors) / factors, inputs)
            for weight in weights
        )
        if error < least:
            best, least = factors, error
    return best


def measure_product_error(weight: np.ndarray, rounded: np.ndarray, inputs: InputStatistics) -> float:
    """Return the sum of squared differences of the products of calibration rows with two weights [out, in].

    `inputs` must have the products of columns.
    """
    assert inputs.products is not None, "the statistics were collected without products"
    difference = weight - rounded
    return float(np.einsum("ij,ij->", difference @ inputs.products, difference, dtype=np.float64))


def fold_norm(
    norm: np.ndarray, factors: np.ndarray, offset: float, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return a norm's weight divided by factors, rounded to the dtype in which it is stored, and the exact factors.

    Args:
        norm: Weight of the norm, float32 [in].
        factors: Factors of columns [in], above 0.
        offset: Added to the weight before rows are multiplied by it.
        dtype: Dtype of the stored weight.

    Returns:
        The new weight float32 [in], and the factors by which columns must be multiplied, so that rounding of the norm
        changes no product. Columns whose norm is 0 before or after keep their weight and have the factor 1.
    """
    multiplier = norm + np.float32(offset)
    folded = (multiplier / factors - np.float32(offset)).astype(dtype).astype(np.float32)
    divisor = folded + np.float32(offset)
    is_usable = (multiplier != 0) & (divisor != 0) & (np.sign(multiplier) == np.sign(divisor))
    exact = np.where(is_usable, multiplier / np.where(is_usable, divisor, 1), 1).astype(np.float32)
    return np.where(is_usable, folded, norm).astype(np.float32), exact

"""The precision in which the numpy references of the kernels compute, and the error function, which numpy lacks."""

from __future__ import annotations

import numpy as np


def widened(array: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
    """Return an array in float32, as the engines compute; a float64 array is returned as it is.

    scales: factors of the last axis, such as those of a weight's columns; None to multiply nothing.
    """
    wide = array.astype(np.result_type(array.dtype, np.float32), copy=False)
    return wide if scales is None else wide * scales


def widen_blocks_reference(elements: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """Return elements [K, N] in float32, times the scale of their block; return `elements` for scales None.

    scales: float32 [ceil(K / 128), ceil(N / 128)], one for each 128 rows and 128 columns.
    """
    if scales is None:
        return elements
    depth, columns = elements.shape
    by_row = np.repeat(scales, 128, axis=0)[:depth]
    return widened(elements) * np.repeat(by_row, 128, axis=1)[:, :columns]


def widened_or_zero(array: np.ndarray | None) -> np.ndarray | float:
    """Return `widened(array)`; return 0.0 for None, so that a missing operand adds nothing."""
    return 0.0 if array is None else widened(array)


def erf_reference(values: np.ndarray) -> np.ndarray:
    """Return the error function of each element, in the dtype of `values`.

    It is 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to the element, by Gauss-Legendre quadrature in
    float64. Beyond 6 it is 1 in float64. Up to there 48 nodes leave an error below 1e-13.
    """
    nodes, weights = np.polynomial.legendre.leggauss(48)
    wide = np.clip(values.astype(np.float64), -6.0, 6.0)
    total = np.zeros_like(wide)
    for node, weight in zip(nodes, weights):
        reached = wide * (node + 1) / 2
        total += weight * np.exp(-reached * reached)
    return (total * wide / np.sqrt(np.pi)).astype(values.dtype)

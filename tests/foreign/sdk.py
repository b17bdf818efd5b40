"""References of the examples of the SDK's documentation, in numpy, from their descriptions."""

from __future__ import annotations

import numpy as np


def exp(x: np.ndarray) -> np.ndarray:
    """Return e to the power of each element."""
    return np.exp(x)


def reciprocal(x: np.ndarray) -> np.ndarray:
    """Compute 1 / x."""
    return 1 / x


def unchanged(x: np.ndarray) -> np.ndarray:
    """Return x itself."""
    return x


def even_and_odd_columns(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns with even numbers, and those with odd ones."""
    return x[:, 0::2], x[:, 1::2]


def max_pool(x: np.ndarray, sz_pool: int) -> np.ndarray:
    """Return maxima of windows side by side; x is (channels, height, width)."""
    c, h, w = x.shape
    return x.reshape(c, h // sz_pool, sz_pool, w // sz_pool, sz_pool).max((2, 4))


def fourth_batch(x: np.ndarray) -> np.ndarray:
    """Return x[3]."""
    return x[3]


def corner(x: np.ndarray) -> np.ndarray:
    """Return rows 384 to 511, columns 0 to 255."""
    return x[384:512, 0:256]


def every_second_row(x: np.ndarray) -> np.ndarray:
    """Return rows 0, 2, … 126."""
    return x[0:128:2]


def reciprocal_plus_one_more(x: np.ndarray) -> np.ndarray:
    """Compute 1 / x + (x + 1)."""
    return 1 / x + (x + 1)


def three_exponentials(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return e to the power of each of three arrays."""
    return np.exp(a), np.exp(b), np.exp(c)

"""The ALU operators on float32 values held in float64, and on raw bits held in Python-sized integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.oracle.formats import FLOAT32_MAX, UNIT, Format, single

Values = np.ndarray


def _largest(x: Values, y: Values) -> Values:
    return np.where(np.isnan(x) | np.isnan(y), np.nan, np.where(x > y, x, y))


def _smallest(x: Values, y: Values) -> Values:
    return np.where(np.isnan(x) | np.isnan(y), np.nan, np.where(x < y, x, y))


ARITHMETIC: dict[str, Callable[[Values, Values], Values]] = {
    "add": lambda x, y: single(x + y),
    "subtract": lambda x, y: single(x - y),
    "multiply": lambda x, y: single(x * y),
    "maximum": _largest,
    "minimum": _smallest,
    "equal": lambda x, y: 1.0 * (x == y),
    "not_equal": lambda x, y: 1.0 * (x != y),
    "greater_equal": lambda x, y: 1.0 * (x >= y),
    "greater": lambda x, y: 1.0 * (x > y),
    "less_equal": lambda x, y: 1.0 * (x <= y),
    "less": lambda x, y: 1.0 * (x < y),
    "logical_and": lambda x, y: 1.0 * ((x != 0) & (y != 0)),
    "logical_or": lambda x, y: 1.0 * ((x != 0) | (y != 0)),
    "logical_xor": lambda x, y: 1.0 * ((x != 0) != (y != 0)),
    "abs_max": lambda x, y: np.where(np.abs(x) > np.abs(y), x, y),
    "abs_min": lambda x, y: np.where(np.abs(x) < np.abs(y), x, y),
}
UNARY: dict[str, Callable[[Values], Values]] = {
    "abs": np.abs,
    "square": lambda x: single(x * x),
    "relu": lambda x: _largest(x, np.zeros_like(x)),
    "reciprocal": lambda x: single(1.0 / x),
}
BITVEC: dict[str, Callable[[Values, Values, int], Values]] = {
    "bitwise_and": lambda x, y, width: x & y,
    "bitwise_or": lambda x, y, width: x | y,
    "bitwise_xor": lambda x, y, width: x ^ y,
    "left_shift": lambda x, y, width: np.where(y < width, x << np.minimum(y, width), 0),
    "right_shift": lambda x, y, width: np.where(y < width, x >> np.minimum(y, width), 0),
}

ZERO_SIGN_OPEN = frozenset({"maximum", "minimum", "relu"})
"""Operators on zeros of both signs, for which no document defines the sign of the result."""

INTEGER: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
}


def slack_of(operator: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return no rounding error; the sign of a zero may be unspecified."""
    return np.zeros(shape) if operator in ZERO_SIGN_OPEN else None


def bitvec(operator: str, x: Values, y: Values, format_: Format) -> Values:
    """Apply a bitvec operator on raw bits of `format_`; shifts are logical, a count of the width or more leaves 0."""
    mask = 2**format_.bits - 1
    x, y = x.astype(np.int64) & mask, np.asarray(y).astype(np.int64) & mask
    return BITVEC[operator](x, y, format_.bits) & mask


def exact_integers(operator: str, x: Values, y: Values) -> Values:
    """Apply native 32-bit arithmetic of GpSimd on raw bits, one pair after the other in Python's integers; it wraps."""
    function = INTEGER[operator]
    pairs = zip(x.reshape(-1).tolist(), y.reshape(-1).tolist())
    return np.array([function(a, b) % 2**32 for a, b in pairs], np.uint64).reshape(x.shape)


# -- reductions whose order is open --------------------------------------------------------------------------------


def total(rows: Values) -> tuple[Values, Values]:
    """Return the sum of each row, and the bound of the error of a float32 sum in any order.

    Each of n - 1 additions has a relative error of half a unit of a partial sum. In no order is a partial sum larger
    than the sum of magnitudes, so the bound is (n - 1) u / (1 - (n - 1) u) times that sum. Where a partial sum could
    overflow, any result is allowed.
    """
    count = rows.shape[1]
    finite = np.where(np.isfinite(rows), rows, 0.0)
    magnitude = np.abs(finite).sum(axis=1, keepdims=True)
    exact = _special(rows, finite.sum(axis=1, keepdims=True))
    slack = (count * UNIT / (1 - count * UNIT)) * magnitude
    open_ = (magnitude * (1 + 2 * count * UNIT) >= FLOAT32_MAX) & ~np.isnan(exact)
    return exact, np.where(open_, np.inf, slack)


def _special(rows: Values, finite_sum: Values) -> Values:
    """Return the sum of a row that has infinities or NaN."""
    up = (rows == np.inf).any(axis=1, keepdims=True)
    down = (rows == -np.inf).any(axis=1, keepdims=True)
    nan = np.isnan(rows).any(axis=1, keepdims=True) | (up & down)
    return np.where(nan, np.nan, np.where(up, np.inf, np.where(down, -np.inf, finite_sum)))


def product(rows: Values) -> tuple[Values, Values]:
    """Return the product of each row, and its bound of n - 1 roundings of relative size u.

    The bound is infinite where a partial product may leave the normal range: where the logarithms' magnitudes add up to
    more than its exponents.
    """
    count = rows.shape[1]
    ordinary = np.isfinite(rows) & (rows != 0)
    logarithms = np.abs(np.log2(np.abs(np.where(ordinary, rows, 1.0)))).sum(axis=1, keepdims=True)
    has = {
        "nan": np.isnan(rows).any(axis=1, keepdims=True),
        "inf": np.isinf(rows).any(axis=1, keepdims=True),
        "zero": (rows == 0).any(axis=1, keepdims=True),
    }
    nan = has["nan"] | (has["inf"] & has["zero"])
    open_ = (logarithms > 125) & ~nan
    moderate = np.where(logarithms > 125, 1.0, np.where(np.isfinite(rows), rows, np.sign(rows) * np.inf))
    exact = np.where(nan, np.nan, np.multiply.reduce(moderate, axis=1, keepdims=True))
    slack = np.where(np.isfinite(exact), (count * UNIT / (1 - count * UNIT)) * np.abs(exact), 0.0)
    return exact, np.where(open_, np.inf, np.where(nan, 0.0, slack))


def folded(operator: str, rows: Values) -> tuple[Values, Values]:
    """Apply a reduction operator over each row: value and slack."""
    if operator == "add":
        return total(rows)
    if operator == "subtract":  # the first element minus the rest
        signs = np.ones((1, rows.shape[1]))
        signs[:, 1:] = -1
        return total(rows * signs)
    if operator == "multiply":
        return product(rows)
    result = rows[:, :1]
    if operator.startswith("logical"):
        result = 1.0 * (result != 0)
    for i in range(1, rows.shape[1]):
        # The accumulator is the second argument: a new element replaces it only where it is strictly beyond.
        result = ARITHMETIC[operator](rows[:, i : i + 1], result)
    return result, np.zeros_like(result)


IDENTITY = {
    "add": 0.0,
    "subtract": 0.0,
    "multiply": 1.0,
    "maximum": -np.inf,
    "minimum": np.inf,
    "abs_max": 0.0,
    "abs_min": np.inf,
}

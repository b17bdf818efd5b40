"""Bound on the error of a right kernel, derived from its roundings.

The model is the usual one of floating point: an operation gives the exact result times (1 + d) with |d| <= u, where u,
the unit roundoff, is half the distance of neighbouring values at 1: 2**-24 for float32, 2**-8 for bfloat16. n such
factors one after another are 1 + d with |d| <= n u / (1 - n u) (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, lemma 3.1).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes

from nkw.errors import InvalidArgument
from simulate.numerics import DType, as_dtype

_FLOAT32_ROUNDOFF = 2.0**-24
_TFLOAT32_ROUNDOFF = 2.0**-11  # ten fraction bits, kept in float32


def roundoff(dtype: Any) -> float:
    """Return the unit roundoff of a float dtype: half the distance from 1 to the next larger value.

    Raises:
        InvalidArgument: NKW-TOLERANCE. The dtype is an integer, packed, or a scale of an MX format.
    """
    element = _check_float(dtype)
    if element == "tfloat32":
        return _TFLOAT32_ROUNDOFF
    return float(ml_dtypes.finfo(element.storage).eps) / 2


def tolerance(
    dtype: Any, magnitude: float, contraction: int = 0, roundings: int = 1, through: Any = None
) -> float:
    """Return the largest absolute error that an output of `dtype` may have.

    Args:
        dtype: Dtype of the output.
        magnitude: Largest magnitude of the intermediate results; for a sum, of its partial sums.
        contraction: Number of products that are summed in float32 (K of a matmul, the columns of a mean). Each of the
            K multiplications and K additions rounds once.
        roundings: Number of roundings on the longest path from input to output, without those of the sum; the last
            one is into `dtype`. Each instruction that writes a tile rounds once. An instruction that enlarges a
            relative error c times (exp of x: |x| times) counts as c.
        through: Narrowest dtype of the roundings before the last; None is `dtype`.

    With u and v the roundoffs of `dtype` and `through`, K the contraction and R the roundings, the bound is
    magnitude * (g(2 K, 2**-24) + g(R - 1, v) + u) with g(n, u) = n u / (1 - n u), and half the smallest positive
    value of `dtype`, below which the relative model ends.

    Raises:
        InvalidArgument: A count is negative, roundings is below 1, the magnitude is not finite, or the counts are so
            large that no digit of the result is reliable.
    """
    element = _check_float(dtype)
    if contraction < 0 or roundings < 1 or not 0 <= magnitude < float("inf"):
        raise InvalidArgument(
            "NKW-TOLERANCE",
            f"contraction={contraction}, roundings={roundings}, magnitude={magnitude}; give a contraction of 0 or "
            "more, one rounding or more and a finite magnitude",
        )
    narrow = roundoff(element if through is None else through)
    relative = (
        _compute_growth(2 * contraction, _FLOAT32_ROUNDOFF)
        + _compute_growth(roundings - 1, narrow)
        + roundoff(element)
    )
    smallest = float(ml_dtypes.finfo(element.storage).smallest_subnormal)
    return magnitude * relative + smallest / 2


def _compute_growth(count: int, unit: float) -> float:
    """Return the largest relative error after `count` successive roundings of roundoff `unit`.

    Raises:
        InvalidArgument: count * unit is 1 or more, so that no digit is reliable.
    """
    if count * unit >= 1:
        raise InvalidArgument(
            "NKW-TOLERANCE",
            f"after {count} roundings of {unit:g} each, no digit of a result is reliable; give a smaller contraction, "
            "fewer roundings or a wider dtype",
        )
    return count * unit / (1 - count * unit)


def _check_float(dtype: Any) -> DType:
    element = as_dtype(dtype)
    if not element.is_float or element.is_packed or element == "float8_e8m0fnu":
        raise InvalidArgument(
            "NKW-TOLERANCE", f"results of dtype {element} are not rounded; compare them for equality"
        )
    return element

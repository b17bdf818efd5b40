"""erf, gelu and their derivatives for float32 arrays, because NumPy has no error function.

`simulate.numerics.activations` calls them. Two polynomials are fitted at their first use, by interpolating the standard
library's `math.erf` and `math.erfc` in Chebyshev nodes, so there are no coefficients to trust:

- |x| < 1: erf(x) = x * A(2x**2 - 1), A of degree 8, relative error of the fit below 1e-12;
- t = |x|: erfc(t) = exp(-t**2) * B(s) / (t + 3) with s = (t - 3) / (t + 3), B of degree 14, fitted up to t = 11, where
  erfc is far below the range of float32; relative error of the fit below 1e-10.

Everything is evaluated in float64 and rounded to float32 once: in float32 the rounding of t**2 alone would cost erfc
about t**2 / 2 units in the last place.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulate.numerics.quiet import quiet

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]

_TAIL_END = 11.0
_SHIFT = 3.0


def _core(z: Float64Array) -> Float64Array:
    """Return erf(x) / x at the points z = 2x**2 - 1: the function that polynomial A fits; no node has x = 0."""
    x = np.sqrt((z + 1) / 2)
    return np.array([math.erf(v) / v for v in x])


def _tail(s: Float64Array) -> Float64Array:
    """Return (t + 3) * exp(t**2) * erfc(t) at the points s = (t - 3) / (t + 3): the function that polynomial B fits."""
    t = _SHIFT * (1 + s) / (1 - s)
    return np.array([(v + _SHIFT) * math.exp(v * v) * math.erfc(v) for v in t])


def _fit(function: Any, degree: int, end: float) -> list[float]:
    """Return the coefficients, highest power first, of the polynomial that interpolates a function on [-1, end].

    Args:
        function: Function of an array of points.
        degree: Degree of the polynomial; it interpolates in degree + 1 Chebyshev nodes.
        end: Upper end of the interval.
    """
    series = np.polynomial.Chebyshev.interpolate(function, degree, domain=[-1.0, end])
    return [float(c) for c in series.convert(kind=np.polynomial.Polynomial).coef[::-1]]


@cache
def _near() -> list[float]:
    return _fit(_core, 8, 1.0)


@cache
def _far() -> list[float]:
    return _fit(_tail, 14, (_TAIL_END - _SHIFT) / (_TAIL_END + _SHIFT))


def _horner(coefficients: list[float], x: Float64Array) -> Float64Array:
    polynomial = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        polynomial *= x
        polynomial += coefficient
    return polynomial


def _upper_tail(t: Float64Array) -> Float64Array:
    """Return erfc(t) for t >= 0; beyond t = 11, the end of the fit, its factor exp(-t**2) is 0 in float32 anyway."""
    s = np.minimum(t, _TAIL_END)
    shifted = s + _SHIFT
    return np.exp(-t * t) * _horner(_far(), (s - _SHIFT) / shifted) / shifted


@quiet
def erf(x: Float32Array) -> Float32Array:
    """Return the error function of each element, rounded once to float32."""
    wide = x.astype(np.float64)
    near = wide * _horner(_near(), 2 * wide * wide - 1)
    far = np.copysign(1 - _upper_tail(np.abs(wide)), wide)
    return np.where(np.abs(wide) < 1, near, far).astype(np.float32)


def _normal_distribution(wide: Float64Array) -> Float64Array:
    """Return (1 + erf(x / sqrt(2))) / 2 in float64, computed from erfc, so that negative x lose no digits."""
    half_tail = 0.5 * _upper_tail(np.abs(wide) * math.sqrt(0.5))
    return np.where(wide < 0, half_tail, 1 - half_tail)


@quiet
def gelu(x: Float32Array) -> Float32Array:
    """Return x times the cumulative normal distribution of x, for each element, rounded once to float32."""
    wide = x.astype(np.float64)
    return (wide * _normal_distribution(wide)).astype(np.float32)


@quiet
def gelu_dx(x: Float32Array) -> Float32Array:
    """Return the derivative of gelu at each element, rounded once to float32."""
    wide = x.astype(np.float64)
    density = np.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    return (_normal_distribution(wide) + wide * density).astype(np.float32)


@quiet
def erf_dx(x: Float32Array) -> Float32Array:
    """Return the derivative of erf at each element, 2 / sqrt(pi) * exp(-x**2), rounded once to float32."""
    wide = x.astype(np.float64)
    return (2 / math.sqrt(math.pi) * np.exp(-wide * wide)).astype(np.float32)

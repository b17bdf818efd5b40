"""The activation functions as the API reference and textbooks define them, in float64, with a bound on float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.oracle.formats import TINY, UNIT, single

_RANGES = {
    "log": (2.0**-64, 2.0**64),
    "sin": (-math.pi, math.pi),
    "arctan": (-math.pi / 2, math.pi / 2),
    "sqrt": (2.0**-116, 2.0**118),
    "rsqrt": (2.0**-87, 2.0**97),
}
"""Inputs for which the reference defines the function; elsewhere the hardware's result is unspecified."""


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf


def _sigmoid(x: float, steep: float = 1.0) -> float:
    return 1 / (1 + _exp(-steep * x))


def _density(x: float) -> float:
    return _exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _normal(x: float) -> float:
    """Compute 0.5 (1 + erf(x / sqrt 2)); erfc keeps the digits of the lower tail."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(_exp(-abs(x)))


def _silu_dx(x: float, steep: float = 1.0) -> float:
    s = _sigmoid(x, steep)
    return s * (1 + steep * x * (1 - s))


def _tanh_gelu(x: float) -> float:
    # 0.5 (1 + tanh y) = 1 / (1 + exp(-2 y)), without the cancellation for negative y.
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


FUNCTIONS: dict[str, Callable[[float], float]] = {
    "copy": lambda x: x,
    "square": lambda x: x * x,
    "sigmoid": _sigmoid,
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * _normal(x),
    "gelu_dx": lambda x: _normal(x) + x * _density(x),
    "gelu_apprx_tanh": _tanh_gelu,
    "gelu_apprx_sigmoid": lambda x: x * _sigmoid(x, 1.702),
    "gelu_apprx_sigmoid_dx": lambda x: _silu_dx(x, 1.702),
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": _silu_dx,
    "tanh": math.tanh,
    "softplus": _softplus,
    "mish": lambda x: x * math.tanh(_softplus(x)),
    "erf": math.erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * _exp(-x * x),
    "exp": _exp,
    "log": math.log,
    "sin": math.sin,
    "arctan": math.atan,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "reciprocal": lambda x: 1 / x if x else math.copysign(math.inf, x),
    "sign": lambda x: math.copysign(1.0, x) if x else 0.0,
    "abs": abs,
}

_EXACT = frozenset({"copy", "relu", "sign", "abs"})
_CROSSING = frozenset({"gelu_dx", "gelu_apprx_sigmoid_dx", "silu_dx"})
"""Sums of terms of order 1 that cancel at a zero away from the origin: the error is absolute, not relative."""
_ROUNDINGS = 16
"""Float32 operations, with an error of one unit each, that an evaluation of the longest formula may chain."""


def activated(
    name: str, x: np.ndarray, slack: np.ndarray, slope: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute f(x) for arguments known up to `slack`, and the bound of the result.

    The bound has three parts. The first is the error of the argument, propagated through f (f at both ends). The second
    is _ROUNDINGS units of f, and as many units of the argument's last place, propagated through f. The third is one of
    float32's smallest numbers.
    """
    if name == "prelu":
        assert slope is not None
        values = np.where(x >= 0, x, np.broadcast_to(slope, x.shape) * x)
        spread = np.maximum(1.0, np.abs(np.broadcast_to(slope, x.shape)))
        bound = slack * spread + UNIT * np.abs(np.where(x >= 0, 0.0, values)) + np.where(x >= 0, 0.0, TINY)
        return single(values), _guarded(values, bound, slack)
    function = np.vectorize(_total(FUNCTIONS[name]), otypes=[np.float64])
    values = function(x)
    open_ = np.isinf(slack)
    if name in _RANGES:
        low, high = _RANGES[name]
        open_ = open_ | ~((x >= low) & (x <= high))
        open_ = open_ & ~np.isnan(x)
    # nl.reciprocal has a documented range too, of magnitudes.
    if name == "reciprocal":
        open_ = open_ | (~((np.abs(x) >= 2.0**-42) & (np.abs(x) <= 2.0**42)) & ~np.isnan(x))
    if name not in _EXACT:
        open_ = open_ | np.isinf(x)
    error = np.where(open_, 0.0, slack)
    if name not in _EXACT:
        error = error + _ROUNDINGS * UNIT * np.abs(np.where(np.isfinite(x), x, 0.0))
    bound = np.maximum(np.abs(function(x + error) - values), np.abs(function(x - error) - values))
    if name not in _EXACT:
        scale = np.abs(values) + (1.0 if name in _CROSSING else 0.0)
        bound = bound + 2 * _ROUNDINGS * UNIT * scale
        # A factor that underflows is off by TINY, times the argument it is multiplied with.
        bound = bound + _ROUNDINGS * TINY * np.maximum(1.0, np.abs(np.where(np.isfinite(x), x, 0.0)))
    return single(values), _guarded(values, bound, np.where(open_, np.inf, 0.0))


def _guarded(values: np.ndarray, bound: np.ndarray, slack: np.ndarray) -> np.ndarray:
    """Guard a bound: infinite values have no error; where the bound is NaN, the value is unknown."""
    bound = np.where(np.isfinite(values), bound, 0.0)
    return np.where(np.isinf(slack) | np.isnan(bound), np.inf, bound)


def _total(function: Callable[[float], float]) -> Callable[[float], float]:
    """Return a function of a float that answers for every float: NaN for NaN and outside its domain."""

    def answered(x: float) -> float:
        if math.isnan(x):
            return math.nan
        try:
            return function(x)
        except (ValueError, ZeroDivisionError):
            return math.nan
        except OverflowError:
            return math.inf

    return answered

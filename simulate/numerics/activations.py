"""Activation functions of the Scalar engine: `ACTIVATION_FUNCTIONS`, a row for each by its name in nki.language.

`function` of a row takes a float32 array and returns a float32 array of the same shape. The hardware evaluates fitted
tables, which are not published. So functions are computed to float32 accuracy, as in the official simulator, also
outside the range in which the hardware's fit is valid (`domain`). Only `sin` has a documented shape there and follows
it.

Functions of one set share a loaded table (`table`): published traces show copy, square and reciprocal square root in
one set, and a reload on every change to sigmoid, silu, exp or softplus. Nothing is published about all further
functions; each is taken to have a set of its own, which overstates reloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulate.numerics.error_function import erf, erf_dx, gelu, gelu_dx
from simulate.numerics.quiet import quiet
from simulate.numerics.resolve import make_resolver

Float32Array = NDArray[np.float32]

_ONE = np.float32(1)
_ZERO = np.float32(0)
_SATURATED = np.float32(40)
"""Argument whose exp, as that of every number above 18, does not change in float32 when 1 is added."""


@dataclass(frozen=True, slots=True)
class ActivationFunction:
    """Function of the Scalar engine.

    Attributes:
        name: Name of the function in nki.language.
        function: The function, from a float32 array to one of the same shape.
        domain: Documented range (low, high) of valid inputs, both ends included; None if every input is valid.
        table: Name of the set of tables that the engine must have loaded; functions of one set need no reload.
        note: Source of the formula, for reports.
        domain_of_magnitude: Whether `domain` bounds |x| instead of x.
        relu_param: Whether `function` takes the slope for negative inputs as its second argument.
    """

    name: str
    function: Callable[..., Float32Array]
    domain: tuple[float, float] | None
    table: str
    note: str
    domain_of_magnitude: bool = False
    relu_param: bool = False

    def in_domain(self, array: Float32Array) -> NDArray[np.bool_]:
        """Return which elements are in the documented input range, as a bool array; NaN counts as inside."""
        if self.domain is None:
            return np.ones(array.shape, bool)
        low, high = self.domain
        x = np.abs(array) if self.domain_of_magnitude else array
        return np.isnan(x) | ((x >= low) & (x <= high))


def _copy(x: Float32Array) -> Float32Array:
    return x


@quiet
def _square(x: Float32Array) -> Float32Array:
    return np.multiply(x, x)


@quiet
def _relu(x: Float32Array) -> Float32Array:
    return np.maximum(x, _ZERO)


@quiet
def _prelu(x: Float32Array, relu_param: Any = 0.0) -> Float32Array:
    return np.where(x >= 0, x, np.multiply(x, relu_param, dtype=np.float32))


@quiet
def _sigmoid(x: Float32Array) -> Float32Array:
    """Return 1 / (1 + exp(-x)), computed as exp(x) / (1 + exp(x)); x is clipped at 40, above which the result is 1."""
    grown = np.exp(np.minimum(x, _SATURATED))
    return grown / (_ONE + grown)


@quiet
def _silu(x: Float32Array) -> Float32Array:
    return x * _sigmoid(x)


@quiet
def _silu_dx(x: Float32Array) -> Float32Array:
    return _sigmoid(x) * (_ONE + x * _sigmoid(-x))


_GELU_SIGMOID_SLOPE = np.float32(1.702)


@quiet
def _gelu_apprx_sigmoid(x: Float32Array) -> Float32Array:
    return x * _sigmoid(_GELU_SIGMOID_SLOPE * x)


@quiet
def _gelu_apprx_sigmoid_dx(x: Float32Array) -> Float32Array:
    # Beyond the clip the derivative is 0 or 1 in float32; without it the product overflows and meets a zero.
    u = np.clip(_GELU_SIGMOID_SLOPE * x, np.float32(-1e4), np.float32(1e4))
    return _sigmoid(u) * (_ONE + u * _sigmoid(-u))


_GELU_TANH_SCALE = np.float32(2 * np.sqrt(2 / np.pi))


@quiet
def _gelu_apprx_tanh(x: Float32Array) -> Float32Array:
    """Return x * (1 + tanh(u)) / 2, computed as x * sigmoid(2u), which has no cancellation for negative u."""
    return x * _sigmoid(_GELU_TANH_SCALE * (x + np.float32(0.044715) * x * x * x))


@quiet
def _softplus(x: Float32Array) -> Float32Array:
    return np.maximum(x, _ZERO) + np.log1p(np.exp(-np.abs(x)))


@quiet
def _mish(x: Float32Array) -> Float32Array:
    return x * np.tanh(_softplus(x))


@quiet
def _sin(x: Float32Array) -> Float32Array:
    """Return sin(x) for |x| <= pi, and a cubic polynomial beyond, because the hardware does not reduce the range.

    The cubic is the third-order Taylor polynomial of sin about the nearer end of the range, -d + d**3 / 6 with d = x -
    (+pi or -pi). So it is continuous in value, slope and curvature, and 27.65 at 9.0, the only published point.
    """
    end = np.copysign(np.float32(np.pi), x)
    d = x - end
    return np.where(np.abs(x) <= np.float32(np.pi), np.sin(x), d * (d * d / np.float32(6) - _ONE))


@quiet
def _rsqrt(x: Float32Array) -> Float32Array:
    return _ONE / np.sqrt(x)


@quiet
def _reciprocal(x: Float32Array) -> Float32Array:
    return _ONE / x


_STANDARD = "standard definition; the documentation prints no formula"
_COPY_SET = "copy"


def _row(
    name: str,
    function: Callable[..., Float32Array],
    *,
    domain: tuple[float, float] | None = None,
    domain_of_magnitude: bool = False,
    table: str | None = None,
    note: str = _STANDARD,
    relu_param: bool = False,
) -> ActivationFunction:
    table_name = name if table is None else table
    return ActivationFunction(name, function, domain, table_name, note, domain_of_magnitude, relu_param)


_FUNCTIONS = (
    _row("copy", _copy, table=_COPY_SET),
    _row("square", _square, table=_COPY_SET),
    _row("sigmoid", _sigmoid),
    _row("relu", _relu),
    _row("prelu", _prelu, relu_param=True, note="x if x >= 0 else relu_param * x; activate2 gives the slope"),
    _row("gelu", gelu),
    _row("gelu_dx", gelu_dx),
    _row(
        "gelu_apprx_tanh", _gelu_apprx_tanh, note="formula of the reference code in the NKI library's tests"
    ),
    _row(
        "gelu_apprx_sigmoid",
        _gelu_apprx_sigmoid,
        note="x * sigmoid(1.702 x), the reference code in the NKI library's tests",
    ),
    _row("gelu_apprx_sigmoid_dx", _gelu_apprx_sigmoid_dx, note="derivative of gelu_apprx_sigmoid"),
    _row("silu", _silu),
    _row("silu_dx", _silu_dx),
    _row("tanh", quiet(np.tanh)),
    _row("softplus", _softplus),
    _row("mish", _mish),
    _row("erf", erf),
    _row("erf_dx", erf_dx),
    _row("exp", quiet(np.exp)),
    _row("log", quiet(np.log), domain=(2.0**-64, 2.0**64)),
    _row(
        "sin",
        _sin,
        domain=(-np.pi, np.pi),
        note="no range reduction; a cubic continues it outside [-pi, pi]",
    ),
    _row("arctan", quiet(np.arctan), domain=(-np.pi / 2, np.pi / 2)),
    _row("sqrt", quiet(np.sqrt), domain=(2.0**-116, 2.0**118)),
    _row("rsqrt", _rsqrt, domain=(2.0**-87, 2.0**97), table=_COPY_SET),
    _row("reciprocal", _reciprocal, domain=(2.0**-42, 2.0**42), domain_of_magnitude=True),
    _row("sign", quiet(np.sign), note="-1, 0 or 1"),
    _row("abs", quiet(np.abs)),
)

ACTIVATION_FUNCTIONS: Mapping[str, ActivationFunction] = MappingProxyType(
    {row.name: row for row in _FUNCTIONS}
)
"""Every activation function by the name of its `nki.language` function."""

_resolve = make_resolver(
    ACTIVATION_FUNCTIONS,
    "activation function of the Scalar engine",
    "pass a function of nki.language such as nl.exp or nl.copy; nl.cos and nl.tan exist only as nl functions",
)


def activation_function(op: object) -> ActivationFunction:
    """Return the row of the activation function that a kernel passed as `op`.

    Args:
        op: A function of nki.language such as nl.exp, a NumPy function such as np.exp, or a row itself.

    Raises:
        InvalidArgument: The object names no activation function (NKW-OPERATOR).
    """
    return _resolve(op)

"""Activation functions against float64 formulas of the standard library.

Bounds are counted, not chosen: every float32 operation of a straightforward evaluation contributes one
rounding (UNIT, relative), every elementary function of numpy the four units in the last place it promises,
every rounding inside an exponent that exponent times UNIT. Where terms can cancel, the bound is relative to
the sum of their magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from nkw.errors import InvalidArgument
from simulate.numerics import ACTIVATION_FUNCTIONS, activation_function
from tests.numerics.functions import NlFunction

pytestmark = pytest.mark.filterwarnings("error")

UNIT = 2.0**-24
SMALLEST = 2.0**-149
ELEMENTARY = 8
"""Four units in the last place are at most eight times the relative error of one rounding."""
FIT = 1e-10 / UNIT
"""Stated error of the erfc polynomial, in roundings."""


def exp(x: float) -> float:
    return math.exp(min(x, 709.0))


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x)) if x >= 0 else exp(x) / (1 + exp(x))


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(exp(-abs(x)))


def gaussian(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def tanh_argument(x: float) -> float:
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def derivative_magnitude(u: float) -> float:
    return sigmoid(u) * (1 + abs(u) * sigmoid(-u))


@dataclass(frozen=True)
class Reference:
    """A float64 formula, how many roundings float32 spends on it, and on its exponent."""

    value: Callable[[float], float]
    roundings: float
    exponent: Callable[[float], float] = lambda x: 0.0
    exponent_roundings: float = 0
    magnitude: Callable[[float], float] | None = None


SIGMOID = 2 * ELEMENTARY + 2

REFERENCES = {
    "copy": Reference(lambda x: x, 0),
    "square": Reference(lambda x: x * x, 1),
    "sigmoid": Reference(sigmoid, SIGMOID),
    "relu": Reference(lambda x: max(x, 0.0), 0),
    "gelu": Reference(lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)), 1 + FIT),
    "gelu_dx": Reference(
        lambda x: 0.5 * math.erfc(-x / math.sqrt(2)) + x * gaussian(x),
        1 + FIT,
        magnitude=lambda x: 0.5 * math.erfc(-x / math.sqrt(2)) + abs(x) * gaussian(x),
    ),
    "gelu_apprx_tanh": Reference(lambda x: x * sigmoid(tanh_argument(x)), SIGMOID + 1, tanh_argument, 7),
    "gelu_apprx_sigmoid": Reference(lambda x: x * sigmoid(1.702 * x), SIGMOID + 1, lambda x: 1.702 * x, 2),
    "gelu_apprx_sigmoid_dx": Reference(
        lambda x: sigmoid(1.702 * x) * (1 + 1.702 * x * sigmoid(-1.702 * x)),
        2 * SIGMOID + 5,
        lambda x: 1.702 * x,
        4,
        magnitude=lambda x: derivative_magnitude(1.702 * x),
    ),
    "silu": Reference(lambda x: x * sigmoid(x), SIGMOID + 1),
    "silu_dx": Reference(
        lambda x: sigmoid(x) * (1 + x * sigmoid(-x)), 2 * SIGMOID + 3, magnitude=derivative_magnitude
    ),
    "tanh": Reference(math.tanh, ELEMENTARY),
    "softplus": Reference(softplus, 2 * ELEMENTARY + 1),
    "mish": Reference(lambda x: x * math.tanh(softplus(x)), 3 * ELEMENTARY + 2),
    "erf": Reference(math.erf, 1 + FIT),
    "erf_dx": Reference(lambda x: 2 / math.sqrt(math.pi) * math.exp(-x * x), 1 + FIT),
    "exp": Reference(exp, ELEMENTARY),
    "log": Reference(math.log, ELEMENTARY),
    "arctan": Reference(math.atan, ELEMENTARY),
    "sqrt": Reference(math.sqrt, 1),
    "rsqrt": Reference(lambda x: 1 / math.sqrt(x), 2),
    "reciprocal": Reference(lambda x: 1 / x, 1),
    "sign": Reference(lambda x: float((x > 0) - (x < 0)), 0),
    "abs": Reference(abs, 0),
}
POSITIVE_ONLY = ("log", "sqrt", "rsqrt")


def inputs(name: str) -> np.ndarray:
    """Return a dense grid around zero, all magnitudes of float32, random values, less what has no finite result."""
    grid = np.linspace(-14, 14, 2001)
    magnitudes = np.logspace(-37, 38, 301)
    scattered = np.random.default_rng(23).standard_normal(2000) * 4
    x = np.concatenate([grid, magnitudes, -magnitudes, scattered, [-104.0, -90.0, 88.0]]).astype(np.float32)
    if name in POSITIVE_ONLY:
        return x[x > 0]
    return x[x != 0] if name == "reciprocal" else x


@pytest.mark.parametrize("name", REFERENCES)
def test_agrees_with_the_formula_in_float64(name: str) -> None:
    reference = REFERENCES[name]
    x = inputs(name)
    got = ACTIVATION_FUNCTIONS[name].function(x)
    assert got.dtype == np.float32
    assert got.shape == x.shape
    largest = float(np.finfo(np.float32).max)
    worst = 0.0
    for value, result in zip(x.tolist(), got.tolist(), strict=True):
        expected = reference.value(value)
        if abs(expected) > largest:
            assert result == math.copysign(math.inf, expected), value
            continue
        magnitude = abs(expected) if reference.magnitude is None else reference.magnitude(value)
        roundings = reference.roundings + reference.exponent_roundings * abs(reference.exponent(value))
        # The last two operations may each meet a subnormal result, which has an absolute error only.
        allowed = magnitude * roundings * UNIT + (SMALLEST if roundings else 0.0) * max(1.0, abs(value))
        error = abs(result - expected)
        worst = max(worst, error / allowed if allowed else error)
        assert error <= allowed, (
            f"{name}({value!r}) = {result!r}, expected {expected!r}, worst so far {worst}"
        )


@pytest.mark.parametrize("name", ACTIVATION_FUNCTIONS)
def test_nan_stays_nan_and_infinity_raises_no_warning(name: str) -> None:
    function = ACTIVATION_FUNCTIONS[name].function
    assert np.isnan(function(np.array([np.nan], np.float32))).all()
    assert function(np.array([np.inf, -np.inf, 0.0, -1.0], np.float32)).dtype == np.float32


@pytest.mark.parametrize("name", ACTIVATION_FUNCTIONS)
@pytest.mark.parametrize("shape", [(0,), (1, 1), (3, 4), (2, 3, 5)], ids=str)
def test_shape_is_kept_and_the_input_left_alone(name: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).uniform(0.5, 2.0, shape).astype(np.float32)
    before = x.copy()
    assert ACTIVATION_FUNCTIONS[name].function(x).shape == shape
    assert np.array_equal(x, before)


def test_sin_is_accurate_inside_its_range() -> None:
    x = np.linspace(-3.14, 3.14, 4001).astype(np.float32)
    got = ACTIVATION_FUNCTIONS["sin"].function(x)
    for value, result in zip(x.tolist(), got.tolist(), strict=True):
        assert abs(result - math.sin(value)) <= ELEMENTARY * UNIT * abs(math.sin(value))


def test_sin_leaves_its_range_on_a_cubic() -> None:
    """Published for the hardware: about 27.65 at 9.0. Inside the range sin ends where the cubic begins."""
    sin = ACTIVATION_FUNCTIONS["sin"].function
    assert round(float(sin(np.array([9.0], np.float32))[0]), 2) == 27.65
    end = np.float32(np.pi)
    x = np.concatenate([np.linspace(3.15, 20, 500), [end, np.nextafter(end, np.float32(4))]]).astype(
        np.float32
    )
    beyond = sin(x)
    for value, result in zip(x.tolist(), beyond.tolist(), strict=True):
        d = value - float(end)
        # Four roundings; sin(end) itself differs from zero by the rounding of pi.
        assert abs(result - (d**3 / 6 - d)) <= 4 * UNIT * (d**3 / 6 + d) + abs(float(end) - math.pi)
    assert np.array_equal(sin(-x), -beyond), "odd"


@pytest.mark.parametrize("slope", [0.0, 0.25, -1.5])
def test_prelu_scales_negative_values(slope: float) -> None:
    row = ACTIVATION_FUNCTIONS["prelu"]
    x = np.array([[-2.0, -0.0, 0.5, 3.0]], np.float32)
    assert row.relu_param
    assert row.function(x, slope).tolist() == [[-2.0 * slope, 0.0, 0.5, 3.0]]
    per_partition = np.full((1, 1), slope, np.float32)
    assert row.function(x, per_partition).tolist() == row.function(x, slope).tolist()
    assert [name for name, other in ACTIVATION_FUNCTIONS.items() if other.relu_param] == ["prelu"]


# NKI 0.6: functions with a limited valid input range.
DOMAINS = {
    "log": (2.0**-64, 2.0**64),
    "sin": (-math.pi, math.pi),
    "arctan": (-math.pi / 2, math.pi / 2),
    "sqrt": (2.0**-116, 2.0**118),
    "rsqrt": (2.0**-87, 2.0**97),
    "reciprocal": (2.0**-42, 2.0**42),
}


@pytest.mark.parametrize("name", ACTIVATION_FUNCTIONS)
def test_domain_is_the_documented_one(name: str) -> None:
    row = ACTIVATION_FUNCTIONS[name]
    assert row.domain == DOMAINS.get(name)
    if row.domain is None:
        assert row.in_domain(np.array([-3e38, 0.0, np.inf, np.nan], np.float32)).all()


@pytest.mark.parametrize("name", ["log", "sqrt", "rsqrt", "reciprocal"])
def test_domain_ends_at_its_limits(name: str) -> None:
    low, high = (np.float32(limit) for limit in DOMAINS[name])
    inside = [low, np.nextafter(low, high), np.nextafter(high, low), high, np.float32(np.nan)]
    outside = [np.nextafter(low, np.float32(0)), np.nextafter(high, np.float32(np.inf)), np.float32(0)]
    in_domain = ACTIVATION_FUNCTIONS[name].in_domain
    assert in_domain(np.array(inside)).all()
    assert not in_domain(np.array(outside)).any()
    assert in_domain(-np.array(inside[:4])).all() == (name == "reciprocal")


def test_table_is_the_documented_one() -> None:
    assert list(ACTIVATION_FUNCTIONS) == [
        *("copy", "square", "sigmoid", "relu", "prelu", "gelu", "gelu_dx", "gelu_apprx_tanh"),
        *("gelu_apprx_sigmoid", "gelu_apprx_sigmoid_dx", "silu", "silu_dx", "tanh", "softplus", "mish"),
        *("erf", "erf_dx", "exp", "log", "sin", "arctan", "sqrt", "rsqrt", "reciprocal", "sign", "abs"),
    ]
    assert all(row.note for row in ACTIVATION_FUNCTIONS.values())


def test_copy_square_and_rsqrt_share_a_table() -> None:
    shared = [name for name, row in ACTIVATION_FUNCTIONS.items() if row.table == "copy"]
    assert shared == ["copy", "square", "rsqrt"]
    other_tables = [row.table for name, row in ACTIVATION_FUNCTIONS.items() if name not in shared]
    assert len(set(other_tables)) == len(other_tables)


@pytest.mark.parametrize("name", ACTIVATION_FUNCTIONS)
def test_functions_of_the_language_resolve_by_their_name(name: str) -> None:
    assert activation_function(NlFunction(name)) is ACTIVATION_FUNCTIONS[name]


@pytest.mark.parametrize(
    ("op", "name"), [(np.exp, "exp"), (np.tanh, "tanh"), (np.copy, "copy"), (np.abs, "abs"), (np.sin, "sin")]
)
def test_numpy_functions_resolve_by_their_name(op: object, name: str) -> None:
    assert activation_function(op) is ACTIVATION_FUNCTIONS[name]


@pytest.mark.parametrize(
    ("op", "shown"), [(np.cos, "function cos"), (math.exp, "function exp"), ("exp", "'exp'"), (None, "None")]
)
def test_refuses_what_is_no_activation_function(op: object, shown: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        activation_function(op)
    assert refusal.value.code == "NKW-OPERATOR"
    assert refusal.value.message == (
        f"{shown} is no activation function of the Scalar engine; pass a function of nki.language such as "
        "nl.exp or nl.copy; nl.cos and nl.tan exist only as nl functions"
    )

"""ALU operators against scalar definitions in Python, one element at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest

from nkw.errors import InvalidArgument
from nkw.targets import GENERATIONS
from simulate.hardware import hardware
from simulate.numerics import ALU_OPERATORS, OperatorFamily, alu_operator
from tests.numerics.functions import NlFunction

pytestmark = pytest.mark.filterwarnings("error")

SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 3.0, 1e-45, 3e38, -3e38, math.inf, -math.inf]
UNIT = 2.0**-24
"""Relative error of one float32 rounding."""


def f32(x: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def truth(condition: bool) -> float:
    return 1.0 if condition else 0.0


EXACT: dict[str, Callable[[float, float], float]] = {
    "add": lambda x, y: f32(x + y),
    "subtract": lambda x, y: f32(x - y),
    "multiply": lambda x, y: f32(x * y),
    "maximum": lambda x, y: max(y, x),
    "minimum": lambda x, y: min(y, x),
    "equal": lambda x, y: truth(x == y),
    "not_equal": lambda x, y: truth(x != y),
    "greater_equal": lambda x, y: truth(x >= y),
    "greater": lambda x, y: truth(x > y),
    "less_equal": lambda x, y: truth(x <= y),
    "less": lambda x, y: truth(x < y),
    "logical_and": lambda x, y: truth(x != 0 and y != 0),
    "logical_or": lambda x, y: truth(x != 0 or y != 0),
    "logical_xor": lambda x, y: truth((x != 0) != (y != 0)),
    "abs_max": lambda x, y: x if abs(x) > abs(y) else y,
    "abs_min": lambda x, y: x if abs(x) < abs(y) else y,
    "average": lambda x, y: f32(f32(x + y) / 2),
}

UNARY: dict[str, Callable[[float], float]] = {
    "abs": abs,
    "square": lambda x: f32(x * x),
    "relu": lambda x: max(x, 0.0),
    "reciprocal": lambda x: f32(1 / x) if x else math.copysign(math.inf, x),
    "bypass": lambda x: x,
}

BITS: dict[str, Callable[[int, int, int], int]] = {
    "bitwise_and": lambda x, y, width: x & y,
    "bitwise_or": lambda x, y, width: x | y,
    "bitwise_xor": lambda x, y, width: x ^ y,
    "left_shift": lambda x, y, width: (x << y) % 2**width if y < width else 0,
    "right_shift": lambda x, y, width: x >> y if y < width else 0,
}


def float_values() -> list[float]:
    rng = np.random.default_rng(3)
    return [*SPECIAL, *(float(v) for v in rng.standard_normal(40).astype(np.float32))]


def same(got: float, expected: float) -> bool:
    return got == expected or (math.isnan(got) and math.isnan(expected))


@pytest.mark.parametrize("name", EXACT)
def test_binary_operator_follows_its_definition(name: str) -> None:
    values = float_values()
    x, y = (side.ravel().astype(np.float32) for side in np.meshgrid(values, values))
    got = ALU_OPERATORS[name].function(x, y)
    assert got.dtype == np.float32
    for a, b, result in zip(x.tolist(), y.tolist(), got.tolist(), strict=True):
        assert same(result, EXACT[name](a, b)), (a, b, result)


@pytest.mark.parametrize("name", EXACT)
def test_a_number_serves_as_either_operand(name: str) -> None:
    function = ALU_OPERATORS[name].function
    array = np.array([[-2.0, 0.5, 3.0]], np.float32)
    assert function(array, 0.5).tolist() == [[EXACT[name](x, 0.5) for x in (-2.0, 0.5, 3.0)]]
    assert function(0.5, array).tolist() == [[EXACT[name](0.5, x) for x in (-2.0, 0.5, 3.0)]]
    assert function(array, 0.5).dtype == function(0.5, array).dtype == np.float32


@pytest.mark.parametrize("name", UNARY)
def test_unary_operator_follows_its_definition(name: str) -> None:
    values = float_values()
    got = ALU_OPERATORS[name].function(np.array(values, np.float32))
    assert got.dtype == np.float32
    assert all(same(r, UNARY[name](f32(v))) for v, r in zip(values, got.tolist(), strict=True))


def test_rsqrt_is_off_by_its_two_roundings_at_most() -> None:
    values = np.random.default_rng(1).uniform(1e-30, 1e30, 500).astype(np.float32)
    got = ALU_OPERATORS["rsqrt"].function(values)
    for v, r in zip(values.tolist(), got.tolist(), strict=True):
        assert abs(r * math.sqrt(v) - 1) <= 2 * UNIT
    edges = ALU_OPERATORS["rsqrt"].function(np.array([0.0, -1.0, math.inf], np.float32)).tolist()
    assert edges[0] == math.inf
    assert math.isnan(edges[1])
    assert edges[2] == 0.0


def test_power_is_a_power() -> None:
    """Allow 8 units in the last place: NumPy promises 4 for float32 functions."""
    rng = np.random.default_rng(2)
    x, y = rng.uniform(0.01, 50, 300).astype(np.float32), rng.uniform(-8, 8, 300).astype(np.float32)
    got = ALU_OPERATORS["power"].function(x, y)
    for a, b, r in zip(x.tolist(), y.tolist(), got.tolist(), strict=True):
        assert abs(r / a**b - 1) <= 8 * UNIT
    assert ALU_OPERATORS["power"].function(np.array([-2.0, 0.0, 4.0], np.float32), 2.0).tolist() == [4, 0, 16]


def test_nan_follows_ieee() -> None:
    nan, one = np.array([np.nan], np.float32), np.array([1.0], np.float32)
    results = {name: float(row.function(nan, one)[0]) for name, row in ALU_OPERATORS.items() if name in EXACT}
    comparisons = ("equal", "greater", "greater_equal", "less", "less_equal")
    assert [results[name] for name in comparisons] == [0.0] * 5
    assert results["not_equal"] == 1.0
    assert math.isnan(results["maximum"])
    assert math.isnan(results["minimum"])


def test_ties_of_magnitude_give_the_second_operand() -> None:
    x, y = np.array([2.0, -2.0, 3.0], np.float32), np.array([-2.0, 2.0, -4.0], np.float32)
    assert ALU_OPERATORS["abs_max"].function(x, y).tolist() == [-2.0, 2.0, -4.0]
    assert ALU_OPERATORS["abs_min"].function(x, y).tolist() == [-2.0, 2.0, 3.0]


INTEGER_TYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32]


@pytest.mark.parametrize("integer", INTEGER_TYPES)
@pytest.mark.parametrize("name", BITS)
def test_bitvec_operator_works_on_raw_bits(name: str, integer: type) -> None:
    info = np.iinfo(integer)
    width = info.bits
    values = [info.min, info.max, 0, 1, width - 1, width, width + 1, *range(2, 9)]
    values += [-1, -2] if info.min else []
    x, y = (np.array(side.ravel(), integer) for side in np.meshgrid(values, values))
    got = ALU_OPERATORS[name].function(x, y)
    assert got.dtype == integer
    for a, b, result in zip(x.tolist(), y.tolist(), got.tolist(), strict=True):
        expected = BITS[name](a % 2**width, b % 2**width, width)
        assert result % 2**width == expected, (a, b, result)


@pytest.mark.parametrize("integer", INTEGER_TYPES)
def test_right_shift_fills_with_zeros_even_for_signed_values(integer: type) -> None:
    width = np.iinfo(integer).bits
    top_bit = np.array([1 << (width - 1)], f"u{width // 8}").view(integer)
    assert ALU_OPERATORS["right_shift"].function(top_bit, 1).tolist() == [1 << (width - 2)]


@pytest.mark.parametrize("integer", INTEGER_TYPES)
def test_a_python_integer_contributes_the_bits_that_fit(integer: type) -> None:
    width = np.iinfo(integer).bits
    ones = np.array([0x55], integer)
    assert ALU_OPERATORS["bitwise_and"].function(ones, -1).tolist() == [0x55]
    assert ALU_OPERATORS["bitwise_and"].function(ones, 2**40 + 0x0F).tolist() == [0x05]
    assert ALU_OPERATORS["bitwise_or"].function(2**width, ones).tolist() == [0x55]
    assert ALU_OPERATORS["left_shift"].function(1, np.array([3], integer)).tolist() == [8]
    assert ALU_OPERATORS["left_shift"].function(ones, 1).dtype == integer


@pytest.mark.parametrize("integer", INTEGER_TYPES)
def test_invert_is_xor_with_all_ones(integer: type) -> None:
    values = np.array([0, 1, 2, np.iinfo(integer).max], integer)
    assert (
        ALU_OPERATORS["invert"].function(values).tolist() == (values ^ np.array(-1).astype(integer)).tolist()
    )


def small_integers(shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 values whose sums and products are exact."""
    return np.random.default_rng(11).integers(-3, 4, shape).astype(np.float32)


FOLDS: dict[str, Callable[[list[float]], float]] = {
    "add": sum,
    "subtract": lambda row: row[0] - sum(row[1:]),
    "multiply": math.prod,
    "maximum": max,
    "minimum": min,
    "logical_and": lambda row: truth(all(row)),
    "logical_or": lambda row: truth(any(row)),
    "logical_xor": lambda row: truth(sum(v != 0 for v in row) % 2 == 1),
    "average": lambda row: f32(sum(row) / len(row)),
    "abs_max": lambda row: next(v for v in row if abs(v) == max(map(abs, row))),
    "abs_min": lambda row: next(v for v in row if abs(v) == min(map(abs, row))),
}


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("axis", [2, (1, 2), -1])
def test_reduction_folds_the_free_axes(name: str, axis: int | tuple[int, ...]) -> None:
    array = small_integers((4, 3, 5))
    reduce = ALU_OPERATORS[name].reduce
    assert reduce is not None
    got = reduce(array, axis)
    rows = array.reshape(4, -1) if isinstance(axis, tuple) else array.reshape(12, 5)
    assert got.dtype == np.float32
    assert got.shape == ((4,) if isinstance(axis, tuple) else (4, 3))
    assert got.ravel().tolist() == [FOLDS[name](row) for row in rows.tolist()]


@pytest.mark.parametrize(
    ("name", "fold"),
    [
        ("bitwise_and", int.__and__),
        ("bitwise_or", int.__or__),
        ("bitwise_xor", int.__xor__),
    ],
)
def test_bit_reduction_keeps_the_dtype(name: str, fold: Callable[[int, int], int]) -> None:
    array = np.random.default_rng(13).integers(-(2**15), 2**15, (3, 2, 6)).astype(np.int16)
    got = ALU_OPERATORS[name].reduce(array, (1, 2))
    assert got.dtype == np.int16
    assert got.tolist() == [functools.reduce(fold, row) for row in array.reshape(3, 12).tolist()]


@pytest.mark.parametrize("name", [name for name, row in ALU_OPERATORS.items() if row.identity is not None])
def test_identity_changes_nothing(name: str) -> None:
    """Check that op(element, identity) is the element; a subtraction starts from zero likewise."""
    row = ALU_OPERATORS[name]
    if row.family is OperatorFamily.bitvec:
        values = np.array([0, 1, -1, 77], np.int32)
    elif name.startswith("logical"):
        values = np.array([0.0, 1.0], np.float32)
    else:
        values = np.array([-2.5, 0.0, 3.0], np.float32)
    assert row.function(values, row.identity).tolist() == values.tolist()


# NKI 0.6: the table of operators. Name, arity, legal as a reduction, engines, first generation.
TABLE = [
    ("invert", 1, False, "vector", 2),
    ("bitwise_and", 2, True, "vector", 2),
    ("bitwise_or", 2, True, "vector", 2),
    ("bitwise_xor", 2, True, "vector", 2),
    ("left_shift", 2, False, "vector", 2),
    ("right_shift", 2, False, "vector", 2),
    ("add", 2, True, "vector gpsimd scalar", 2),
    ("subtract", 2, True, "vector", 2),
    ("multiply", 2, True, "vector gpsimd scalar", 2),
    ("maximum", 2, True, "vector", 2),
    ("minimum", 2, True, "vector", 2),
    ("equal", 2, False, "vector", 2),
    ("not_equal", 2, False, "vector", 2),
    ("greater_equal", 2, False, "vector", 2),
    ("greater", 2, False, "vector", 2),
    ("less_equal", 2, False, "vector", 2),
    ("less", 2, False, "vector", 2),
    ("logical_and", 2, True, "vector", 2),
    ("logical_or", 2, True, "vector", 2),
    ("logical_xor", 2, True, "vector", 2),
    ("power", 2, False, "gpsimd", 2),
    ("abs_max", 2, False, "vector", 4),
    ("abs_min", 2, False, "vector", 4),
    ("abs", 1, False, "vector scalar", 2),
    ("square", 1, False, "vector", 4),
    ("relu", 1, False, "vector", 4),
    ("rsqrt", 1, False, "gpsimd scalar", 2),
    ("reciprocal", 1, False, "vector scalar", 2),
    ("bypass", 1, False, "scalar", 4),
    ("average", 2, True, "gpsimd", 2),
]


def test_table_is_the_documented_one() -> None:
    chips = [hardware(target) for target in GENERATIONS]
    rows = [
        (row.name, row.arity, row.reducible, row.engines, [row.exists_on(chip) for chip in chips])
        for row in ALU_OPERATORS.values()
    ]
    assert rows == [
        (name, arity, reducible, frozenset(engines.split()), [chip.generation >= first for chip in chips])
        for name, arity, reducible, engines, first in TABLE
    ]
    bitvec = [name for name, row in ALU_OPERATORS.items() if row.family is OperatorFamily.bitvec]
    assert bitvec == [name for name, *_ in TABLE[:6]]
    assert all(row.reduce is not None for row in ALU_OPERATORS.values() if row.reducible)


@pytest.mark.parametrize("name", ALU_OPERATORS)
def test_functions_of_the_language_resolve_by_their_name(name: str) -> None:
    assert alu_operator(NlFunction(name)) is ALU_OPERATORS[name]
    assert alu_operator(ALU_OPERATORS[name]) is ALU_OPERATORS[name]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (NlFunction("max"), "maximum"),
        (NlFunction("min"), "minimum"),
        (np.add, "add"),
        (np.max, "maximum"),
        (np.amax, "maximum"),
        (np.min, "minimum"),
        (np.maximum, "maximum"),
        (np.minimum, "minimum"),
        (np.power, "power"),
        (np.abs, "abs"),
        (np.bitwise_and, "bitwise_and"),
        (np.invert, "invert"),
        (np.left_shift, "left_shift"),
        (np.less_equal, "less_equal"),
        (np.logical_xor, "logical_xor"),
        (np.square, "square"),
    ],
)
def test_numpy_functions_resolve_by_their_name(op: object, name: str) -> None:
    assert alu_operator(op) is ALU_OPERATORS[name]


def add(x: float, y: float) -> float:
    return x + y


@pytest.mark.parametrize(
    ("op", "shown"),
    [
        (add, "function add"),
        (np.divide, "function divide"),
        (NlFunction("mod"), "function mod"),
        (math.pow, "function pow"),
        ("add", "'add'"),
        (None, "None"),
        (3, "3"),
        ([], "[]"),
        ({"op": 1}, "{'op': 1}"),
    ],
)
def test_refuses_what_is_no_operator(op: object, shown: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        alu_operator(op)
    assert refusal.value.code == "NKW-OPERATOR"
    assert refusal.value.message == (
        f"{shown.replace('divide', np.divide.__name__)} is no ALU operator of a NeuronCore; "
        "pass a function of nki.language such as nl.add or nl.bitwise_and; "
        "there is no hardware divide or modulo, multiply by nl.reciprocal instead"
    )

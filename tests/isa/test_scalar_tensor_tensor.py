"""scalar_tensor_tensor and reciprocal against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from simulate.nki import language as nl
from tests.isa.alu import ARITHMETIC, DTYPES, SHAPES, scalar_by_scalar
from tests.isa.reference import (
    as_float64,
    assert_same,
    assert_same_bits,
    rounded,
    sample,
    through_float32,
)
from tests.isa.tiles import PSUM, Fresh, Given, execute, healthy, plan, refuses, tile


@pytest.mark.parametrize("reverse", [(False, False), (True, True)])
@pytest.mark.parametrize("names", [("multiply", "add"), ("subtract", "multiply"), ("maximum", "less")])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_scalar_tensor_tensor(
    dtypes: tuple[str, str, str], names: tuple[str, str], reverse: tuple[bool, bool]
) -> None:
    shape = SHAPES[len(dtypes[1]) % len(SHAPES)]
    data, other = sample(dtypes[0], shape, "x"), sample(dtypes[1], shape, "y")
    column = sample("float32", (shape[0], 1))
    first, second = (
        (lambda x, y, f=ARITHMETIC[n]: f(y, x)) if r else ARITHMETIC[n] for n, r in zip(names, reverse)
    )
    for operand0 in (column, 0.7):
        values = np.asarray(operand0, np.float32).reshape(-1, *(1,) * (len(shape) - 1)).astype(np.float64)
        inner = rounded(scalar_by_scalar(first, as_float64(data), values), "float32")
        expected = through_float32(scalar_by_scalar(second, inner, as_float64(other)), dtypes[2])
        done = execute(
            "trn2",
            "scalar_tensor_tensor",
            dst=Fresh(shape, dtypes[2]),
            data=Given(data, PSUM),
            op0=getattr(nl, names[0]),
            operand0=operand0,
            op1=getattr(nl, names[1]),
            operand1=other,
            reverse0=reverse[0],
            reverse1=reverse[1],
        )
        assert_same(done["dst"], expected)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"op0": nl.bitwise_and}, "NKW-ARITHMETIC-OPERATOR"),
        ({"op1": nl.bitwise_and}, "NKW-ARITHMETIC-OPERATOR"),
        ({"op0": nl.power}, "NKW-ARITHMETIC-OPERATOR"),
        ({"op0": nl.rsqrt, "operand0": None}, "NKW-ARITHMETIC-OPERATOR"),
        ({"op1": nl.abs}, "NKW-DEVICE-OPERATOR"),
        ({"op0": nl.abs_max}, "NKW-OPERATOR-CHIP"),
        ({"operand0": tile((8, 1), "int32")}, "NKW-DTYPE-ALLOWED"),
        ({"operand1": tile((8, 9))}, "NKW-ELEMENTS-AGREE"),
        ({"operand1": tile((9, 8))}, "NKW-PARTITIONS-AGREE"),
        ({"dst": tile((8, 9))}, "NKW-ELEMENTS-AGREE"),
        ({"data": tile((8, 8), buffer=PSUM), "operand1": tile((8, 8), buffer=PSUM)}, "NKW-ONE-PSUM-INPUT"),
    ],
)
def test_refusals_of_scalar_tensor_tensor(changes: dict[str, Any], code: str) -> None:
    refuses(code, "trn2", "scalar_tensor_tensor", **healthy("scalar_tensor_tensor", **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"op0": nl.abs, "operand0": None},
        {"operand0": 3},
        {"operand0": tile((8, 1), "bfloat16")},
        {"operand0": tile((8, 1), "float16")},
        {"data": tile((8, 8), buffer=PSUM)},
        {"operand1": tile((8, 8), buffer=PSUM)},
        {"operand1": tile((8, 2, 4), "bfloat16")},
    ],
)
def test_operands_that_scalar_tensor_tensor_takes(changes: dict[str, Any]) -> None:
    plan("trn2", "scalar_tensor_tensor", **healthy("scalar_tensor_tensor", **changes))


@pytest.mark.parametrize("dtypes", DTYPES)
def test_reciprocal_is_rounded_correctly(dtypes: tuple[str, str, str]) -> None:
    data = sample(dtypes[0], (127, 7))
    values = as_float64(data)
    expected = scalar_by_scalar(lambda x: 1 / x if x else math.copysign(math.inf, x), values)
    done = execute("trn2", "reciprocal", dst=Fresh((127, 7), dtypes[2]), data=data)
    assert_same(done["dst"], through_float32(expected, dtypes[2]))


def test_reciprocal_of_zeros_and_infinities() -> None:
    data = np.array([[0.0, -0.0, np.inf, -np.inf, np.nan]], np.float32)
    done = execute("trn2", "reciprocal", dst=Fresh((1, 5)), data=data)["dst"]
    assert_same_bits(done[:, :4].copy(), np.array([[np.inf, -np.inf, 0.0, -0.0]], np.float32))
    assert np.isnan(done[0, 4])

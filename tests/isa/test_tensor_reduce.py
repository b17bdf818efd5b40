"""tensor_reduce: which dims, which operators, and values against Python's own arithmetic."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simulate.nki import language as nl
from tests.isa.reference import INTEGERS, as_float64, assert_same, assert_same_bits, sample, through_float32
from tests.isa.tiles import PSUM, Fresh, Given, execute, healthy, plan, refuses, tile

FOLDS: dict[str, Callable[[list[float]], float]] = {
    "add": sum,
    "subtract": lambda row: row[0] - sum(row[1:]),
    "maximum": max,
    "minimum": min,
    "logical_and": lambda row: float(all(row)),
    "logical_or": lambda row: float(any(row)),
    "logical_xor": lambda row: float(sum(x != 0 for x in row) % 2),
}
BITS: dict[str, Callable[[int, int], int]] = {
    "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | y,
    "bitwise_xor": lambda x, y: x ^ y,
}


def _rows(data: np.ndarray, axes: int) -> list[tuple[tuple[int, ...], list[float]]]:
    """Return each index that is kept, and the elements reduced into it, in streaming order."""
    kept = data.shape[: data.ndim - axes]
    return [(index, data[index].reshape(-1).tolist()) for index in itertools.product(*map(range, kept))]


def _folded(function: Callable[[list[Any]], Any], data: np.ndarray, axes: int) -> np.ndarray:
    result = np.zeros(data.shape[: data.ndim - axes], np.float64)
    for index, row in _rows(data, axes):
        result[index] = function(row)
    return result


def _whole_numbers(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Draw small whole numbers, whose float32 sums are exact in any order."""
    return np.random.default_rng(3).integers(0, 5, shape).astype(sample(dtype, (1,)).dtype)


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3", "int32", "uint8"])
@pytest.mark.parametrize(
    ("shape", "axes"), [((1, 5), 1), ((127, 3, 7), 1), ((128, 3, 7), 2), ((5, 2, 3, 4), 3)]
)
def test_reduces_trailing_dims(name: str, dtype: str, shape: tuple[int, ...], axes: int) -> None:
    data = _whole_numbers(shape, dtype)
    expected = _folded(FOLDS[name], data.astype(np.float64), axes)
    result = (shape[0], *shape[1 : len(shape) - axes]) if axes < len(shape) - 1 else (shape[0], 1)
    trailing = tuple(range(len(shape) - axes, len(shape)))
    for axis, negate in ((trailing, False), (trailing[::-1], True)):
        done = execute(
            "trn2",
            "tensor_reduce",
            dst=Fresh(result),
            op=getattr(nl, name),
            data=data,
            axis=axis if len(axis) > 1 else axis[0],
            negate=negate,
        )["dst"]
        assert_same(done, (-expected if negate else expected).reshape(result))


def test_products() -> None:
    data = np.random.default_rng(5).choice([-2.0, -1.0, 0.5, 1.0, 4.0], (127, 9)).astype(np.float32)
    done = execute("trn1", "tensor_reduce", dst=Fresh((127, 1)), op=nl.multiply, data=data, axis=1)["dst"]
    assert_same(
        done,
        _folded(lambda row: functools.reduce(lambda x, y: x * y, row), data.astype(float), 1).reshape(-1, 1),
    )


def test_sums_stay_within_the_error_of_float32_summation() -> None:
    data = sample("float32", (128, 1000))
    done = execute("trn2", "tensor_reduce", dst=Fresh((128, 1)), op=nl.add, data=data, axis=1)["dst"]
    exact, magnitude = data.astype(np.float64).sum(axis=1), np.abs(data.astype(np.float64)).sum(axis=1)
    assert (np.abs(done[:, 0] - exact) <= 1000 * 2.0**-24 / (1 - 1000 * 2.0**-24) * magnitude).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int16", "uint8"])
def test_the_result_is_rounded_once(dtype: str) -> None:
    data = Given(_whole_numbers((7, 300)), PSUM)
    done = execute("trn2", "tensor_reduce", dst=Fresh((7, 1), dtype), op=nl.add, data=data, axis=1)["dst"]
    assert_same(done[:, 0], through_float32(data.values.astype(np.float64).sum(axis=1), dtype))


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_bitvec_reductions_work_on_raw_bits(name: str, dtype: str) -> None:
    data = sample(dtype, (128, 3, 5))
    words = data.view(f"u{data.dtype.itemsize}")
    folded = [functools.reduce(BITS[name], row) for _, row in _rows(words, 1)]
    expected = np.array(folded, words.dtype).view(data.dtype).reshape(128, 3)
    done = execute(
        "trn1", "tensor_reduce", dst=Fresh((128, 3), dtype), op=getattr(nl, name), data=data, axis=2
    )
    assert_same_bits(done["dst"], expected)


def test_maximum_passes_nan_on() -> None:
    data = np.array([[1.0, np.nan, 3.0], [1.0, 2.0, 3.0]], np.float32)
    for op in (nl.maximum, nl.minimum):
        done = execute("trn2", "tensor_reduce", dst=Fresh((2, 1)), op=op, data=data, axis=1)["dst"]
        assert np.isnan(done[0, 0]) and not np.isnan(done[1, 0])


@pytest.mark.parametrize(
    ("shape", "axis", "kept"),
    [
        ((8, 6), 1, 1),
        ((8, 6), (1,), 1),
        ((8, 6), [1], 1),
        ((8, 6), np.int64(1), 1),
        ((8, 2, 3), 2, 2),
        ((8, 2, 3), (1, 2), 1),
        ((8, 2, 3), (2, 1), 1),
        ((8, 2, 3, 4), (2, 3), 2),
        ((8, 2, 3, 4), 3, 6),
        ((8, 6), 0, None),
        ((8, 6), (0, 1), None),
        ((8, 6), 2, None),
        ((8, 6), -3, None),
        ((8, 6), (), None),
        ((8, 6), "x", None),
        ((8, 6), None, None),
        ((8, 6), 1.0, None),
        ((8, 2, 3), 1, None),
        ((8, 2, 3), (1, 1), None),
        ((8, 2, 3, 4), (1, 3), None),
        ((8, 2, 3, 4), (1, 2), None),
    ],
)
def test_the_reduced_dims_are_a_run_that_ends_with_the_last(
    shape: tuple[int, ...], axis: Any, kept: int | None
) -> None:
    call = {"op": nl.add, "data": tile(shape), "axis": axis}
    if kept is None:
        refuses("NKW-REDUCE-AXIS", "trn2", "tensor_reduce", dst=tile((8, 1)), **call)
        return
    for keepdims in (False, True):
        plan("trn2", "tensor_reduce", dst=tile((8, kept)), **call, keepdims=keepdims)
    refuses("NKW-REDUCE-COUNT", "trn2", "tensor_reduce", dst=tile((8, kept + 1)), **call)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"op": nl.equal}, "NKW-REDUCE-OPERATOR"),
        ({"op": nl.power}, "NKW-REDUCE-OPERATOR"),
        ({"op": nl.left_shift}, "NKW-REDUCE-OPERATOR"),
        ({"op": nl.abs}, "NKW-REDUCE-OPERATOR"),
        ({"op": nl.average}, "NKW-REDUCE-OPERATOR"),
        ({"op": nl.abs_max}, "NKW-OPERATOR-CHIP"),
        ({"op": nl.exp}, "NKW-OPERATOR"),
        ({"op": nl.bitwise_or}, "NKW-BITVEC-INTEGER"),
        ({"dst": tile((7, 1))}, "NKW-PARTITIONS-AGREE"),
    ],
)
def test_refusals_of_tensor_reduce(changes: dict[str, Any], code: str) -> None:
    refuses(code, "trn2", "tensor_reduce", **healthy("tensor_reduce", **changes))


def test_bits_are_not_negated() -> None:
    call = {"dst": tile((8, 1), "int32"), "op": nl.bitwise_xor, "data": tile((8, 8), "int32"), "axis": 1}
    plan("trn2", "tensor_reduce", **call)
    refuses("NKW-REDUCE-NEGATE", "trn2", "tensor_reduce", **call, negate=True)
    refuses("NKW-BITVEC-INTEGER", "trn2", "tensor_reduce", **{**call, "dst": tile((8, 1), "int16")})


def test_nl_max_and_nl_min_are_accepted_spellings() -> None:
    data = as_float64(sample("float32", (3, 9))).astype(np.float32)
    for op, function in ((nl.max, np.max), (nl.min, np.min)):
        done = execute("trn2", "tensor_reduce", dst=Fresh((3, 1)), op=op, data=data, axis=1)["dst"]
        assert_same(done[:, 0], function(data, axis=1))


def test_the_message_of_a_reduction_over_partitions() -> None:
    error = refuses(
        "NKW-REDUCE-AXIS", "trn2", "tensor_reduce", dst=tile((8, 1)), op=nl.add, data=tile((8, 2, 3)), axis=0
    )
    assert str(error) == (
        "[NKW-REDUCE-AXIS] tensor_reduce: tensor_reduce reduces a run of free dims that ends with the last; the "
        "partition dim cannot be reduced.\n"
        "  seen:  axis=0 of data (8, 2, 3)\n"
        "  limit: (2,) or (1, 2)\n"
        "  dst = (8, 1) float32 in sbuf\n"
        "  op = add\n"
        "  data = (8, 2, 3) float32 in sbuf\n"
        "  axis = 0\n"
        "  try:   permute the view so that the reduced dims come last; reduce partitions with a matmul"
    )

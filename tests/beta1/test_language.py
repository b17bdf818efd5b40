"""Functions of `nki.language` and operators of tiles, against numpy on values for which they are exact."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import simulate.beta1.isa as nisa
import simulate.beta1.language as nl
from nkw.errors import InvalidArgument, RuleViolation
from tests.beta1.kernels import run, stored, whole_numbers

X, Y = whole_numbers(128, 48), whole_numbers(128, 48, seed=1)
COLUMN, ROW = whole_numbers(128, 1, seed=2), whole_numbers(1, 48, seed=3)
BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "less": np.less,
    "greater_equal": np.greater_equal,
    "not_equal": np.not_equal,
}


@pytest.mark.parametrize("name", sorted(BINARY))
@pytest.mark.parametrize("other", [Y, COLUMN, ROW, 3.0], ids=["tile", "column", "row", "number"])
@pytest.mark.parametrize("swapped", [False, True])
def test_binary_functions_broadcast_as_numpy_does(name: str, other, swapped: bool) -> None:
    def kernel(x, y):
        first, second = nl.load(x), nl.load(y) if not isinstance(y, float) else y
        operands = (second, first) if swapped else (first, second)
        return stored(getattr(nl, name)(*operands, dtype=np.float32))

    expected = BINARY[name](other, X) if swapped else BINARY[name](X, other)
    assert np.array_equal(run(kernel, X, other), expected)


def test_operators_of_a_tile_are_those_functions() -> None:
    def kernel(x, y):
        a, b = nl.load(x), nl.load(y)
        return stored(2.0 - (a + b) * 0.5 - b / 4.0 - (-a))

    assert np.array_equal(run(kernel, X, Y), 2 - (X + Y) * 0.5 - Y / 4 + X)


def test_division_rounds_once_and_divides_integers_into_fractions() -> None:
    def kernel(x):
        tile = nl.load(x)
        return stored(tile / 38), stored(nl.floor(tile / 38, dtype=nl.int32)), stored(nl.mod(tile, 38))

    numbers = np.arange(128 * 20, dtype=np.int32).reshape(128, 20)
    quotient, whole_part, remainder = run(kernel, numbers)
    assert np.array_equal(quotient, numbers.astype(np.float32) / np.float32(38))
    assert np.array_equal(whole_part, numbers // 38) and np.array_equal(remainder, numbers % 38)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (np.float32, ml_dtypes.bfloat16, np.float32),
        (np.float16, ml_dtypes.bfloat16, np.float32),
        (np.int32, np.float16, np.float16),
        (np.int8, np.int32, np.int32),
    ],
)
def test_the_result_has_the_wider_dtype(first, second, expected) -> None:
    x, y = X.astype(first), Y.astype(second)
    result = run(lambda a, b: stored(nl.load(a) + nl.load(b)), x, y)
    assert result.dtype == expected and np.array_equal(result.astype(np.float32), X + Y)


def test_a_number_keeps_the_dtype_of_a_float_tile() -> None:
    assert run(lambda a: stored(nl.load(a) * 0.5), X.astype(np.float16)).dtype == np.float16


def test_refuses_shapes_that_do_not_broadcast() -> None:
    with pytest.raises(RuleViolation, match="numpy's rule"):
        run(lambda a, b: stored(nl.load(a) + nl.load(b)), X, whole_numbers(128, 47))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 127, 128])
def test_a_row_is_broadcast_over_partitions(rows: int) -> None:
    result = run(lambda r: stored(nl.load(r).broadcast_to((rows, 48))), ROW)
    assert np.array_equal(result, np.broadcast_to(ROW, (rows, 48)))


@pytest.mark.parametrize("axis", [1, 3, (1,), (2, 3), (1, 3), (-1, -3), (1, 2, 3)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions_take_any_free_dims(axis, keepdims: bool) -> None:
    data = whole_numbers(16, 3, 4, 5)

    def kernel(x):
        tile = nl.load(x)
        return tuple(stored(f(tile, axis=axis, keepdims=keepdims)) for f in (nl.sum, nl.max, nl.min))

    for result, function in zip(run(kernel, data), (np.sum, np.max, np.min)):
        expected = function(data, axis=axis, keepdims=keepdims)
        assert np.array_equal(result, expected.reshape(16, 1) if expected.ndim == 1 else expected)


@pytest.mark.parametrize("axis", [0, 2, -2, (1, 1), (), 1.0])
def test_refuses_other_axes(axis) -> None:
    with pytest.raises(RuleViolation, match="runs over free dims"):
        run(lambda x: stored(nl.sum(nl.load(x), axis=axis)), X)


def test_mean_and_variance_are_exact_on_whole_numbers() -> None:
    data = 4 * whole_numbers(128, 64, seed=4)

    def kernel(x):
        tile = nl.load(x)
        return stored(nl.mean(tile, axis=1)), stored(nl.mean(tile * tile, axis=1))

    mean, square = run(kernel, data)
    assert np.array_equal(mean[:, 0], data.mean(1)) and np.array_equal(square[:, 0], (data * data).mean(1))


def test_softmax_sums_to_one() -> None:
    result = run(lambda x: stored(nl.softmax(nl.load(x), axis=-1)), X).astype(np.float64)
    powers = np.exp(X.astype(np.float64) - X.max(1, keepdims=True))
    unit = 2.0**-24
    assert np.abs(result - powers / powers.sum(1, keepdims=True)).max() <= (X.shape[1] + 6) * unit
    assert np.abs(result.sum(1) - 1).max() <= 2 * X.shape[1] * unit


def test_where_takes_tiles_and_numbers() -> None:
    def kernel(x, y):
        a, b = nl.load(x), nl.load(y)
        return stored(nl.where(a < b, a, b)), stored(nl.where(nl.greater(a, 0, dtype=np.float32), a, 0.0))

    smaller, positive = run(kernel, X, Y)
    assert np.array_equal(smaller, np.minimum(X, Y)) and np.array_equal(positive, np.maximum(X, 0))


@pytest.mark.parametrize("transposed", [False, True])
def test_matmul_transposes_its_first_operand_if_needed(transposed: bool) -> None:
    a, b = whole_numbers(64, 96), whole_numbers(64 if transposed else 96, 80, seed=1)
    result = run(lambda x, y: stored(nl.matmul(nl.load(x), nl.load(y), transpose_x=transposed)), a, b)
    assert np.array_equal(result, (a.T if transposed else a) @ b)


def test_load_transpose2d_and_transpose() -> None:
    assert np.array_equal(run(lambda x: stored(nl.load_transpose2d(x)), X), X.T)
    assert np.array_equal(run(lambda x: stored(nl.transpose(nl.load(x))), X), X.T)


def test_constants_and_casts() -> None:
    values = np.arange(12).reshape(3, 4)
    result = run(lambda x: stored(nl.load(nl.shared_constant(values, nl.bfloat16))), X)
    assert result.dtype == ml_dtypes.bfloat16 and np.array_equal(result.astype(int), values)
    assert nl.static_cast(X, nl.bfloat16).dtype == ml_dtypes.bfloat16
    with pytest.raises(InvalidArgument, match="shared_constant"):
        run(lambda x: nl.shared_constant(3.0), X)


def test_affine_select_takes_one_comparison() -> None:
    def kernel(x, conditions):
        i_p, i_f = nl.mgrid[0:128, 0:48]
        pred = (i_p >= i_f) if conditions == 1 else (i_p >= i_f) & (i_f < 3)
        return stored(nisa.affine_select(pred, nl.load(x), -9.0))

    assert np.array_equal(run(kernel, X, 1), np.where(np.tril(np.ones_like(X), 0) > 0, X, -9))
    with pytest.raises(RuleViolation, match="one comparison"):
        run(kernel, X, 2)


def test_numpy_functions_are_operators() -> None:
    def kernel(x):
        tile = nl.load(x)
        total = nisa.tensor_reduce(np.sum, tile, axis=1)
        return stored(nisa.tensor_scalar(tile, np.subtract, total, op1=np.divide, operand1=2.0))

    assert np.array_equal(run(kernel, X), (X - X.sum(1, keepdims=True)) / 2)


def test_accumulated_results_go_where_reduce_res_says() -> None:
    def kernel(x):
        tile, sums = nl.load(x), nl.ndarray((128, 2), np.float32)
        squares = nisa.activation_reduce(nl.square, tile, reduce_op=np.add, reduce_res=sums[:, 0:1])
        doubled = nisa.tensor_scalar_reduce(
            data=squares, op0=np.multiply, operand0=2.0, reduce_op=np.max, reduce_res=sums[:, 1:2]
        )
        return stored(doubled), stored(sums)

    doubled, sums = run(kernel, X)
    assert np.array_equal(doubled, 2 * X * X)
    assert np.array_equal(sums, np.stack([(X * X).sum(1), (2 * X * X).max(1)], 1))


def test_generations_are_ordered() -> None:
    assert nisa.nc_version.gen3 > nisa.nc_version.gen2

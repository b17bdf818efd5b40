"""Messages for operands that do not fit name the operand, the expected layout and a call that produces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nkw.errors import RuleViolation
from simulate import nki
from simulate.nki import isa as nisa
from simulate.nki import language as nl

CONTRACTION = (
    "stationary [K, M], moving [K, N], dst [M, N]: the contraction K lies on the partitions of both operands"
)


def launched(kernel: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    return arrays, nki.jit(kernel)(*arrays)


def refused(kernel: Callable[..., Any], *shapes: tuple[int, ...]) -> RuleViolation:
    with pytest.raises(RuleViolation) as error:
        launched(kernel, *shapes)
    return error.value


def stored(tile: Any) -> Any:
    out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


def product(a: Any, b: Any, m: int, n: int) -> Any:
    sums = nl.ndarray((m, n), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=a, moving=b)
    return stored(nl.copy(sums))


def test_a_stationary_operand_that_is_not_transposed_is_named() -> None:
    error = refused(lambda a, b: product(nl.load(a), nl.load(b), 64, 32), (64, 128), (128, 32))
    assert error.code == "NKW-PARTITIONS-AGREE"
    assert error.seen == (
        "stationary has 64 partitions, moving has 128; stationary (64, 128) has the layout [M, K]"
    )
    assert error.limit == CONTRACTION
    assert error.hint == (
        "transpose stationary: nisa.nc_transpose(dst=t, data=stationary) with t (128, 64) float32 in PSUM, then "
        "nisa.tensor_copy to SBUF; or load it with nl.load_transpose2d"
    )


def test_both_ways_to_transpose_it_are_accepted() -> None:
    def on_chip(a: Any, b: Any) -> Any:
        t = nl.ndarray((128, 64), nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=t, data=nl.load(a))
        return product(nl.copy(t), nl.load(b), 64, 32)

    def loaded(a: Any, b: Any) -> Any:
        return product(nl.load_transpose2d(a), nl.load(b), 64, 32)

    for kernel in (on_chip, loaded):
        (a, b), out = launched(kernel, (64, 128), (128, 32))
        exact = a.astype(np.float64) @ b
        assert np.abs(out - exact).max() < 128 * 2.0**-22 * np.abs(exact).max()


def test_a_moving_operand_that_is_not_transposed_is_named() -> None:
    error = refused(lambda a, b: product(nl.load(a), nl.load(b), 64, 32), (128, 64), (32, 128))
    assert error.seen == (
        "stationary has 128 partitions, moving has 32; moving (32, 128) has the layout [N, K]"
    )
    assert error.hint.startswith("transpose moving: nisa.nc_transpose(dst=t, data=moving) with t (128, 32)")


def test_contractions_that_differ_otherwise_are_to_be_sliced() -> None:
    error = refused(lambda a, b: product(nl.load(a), nl.load(b), 64, 32), (127, 64), (128, 32))
    assert error.seen == "stationary has 127 partitions, moving has 128"
    assert error.hint == "slice both operands to the same rows of the contraction"


def test_a_result_of_swapped_operands_is_named() -> None:
    error = refused(lambda a, b: product(nl.load(a), nl.load(b), 32, 64), (128, 64), (128, 32))
    assert error.hint == "swap stationary and moving for this dst, or allocate dst with (64, 32)"
    error = refused(lambda a, b: product(nl.load(a), nl.load(b), 64, 33), (128, 64), (128, 32))
    assert error.hint == "slice dst to [0:64, 0:32]"


def row_hint(operand: str) -> str:
    return (
        f"{operand} has one row, which engines do not repeat: load it into 128 partitions with "
        "nl.load(row.broadcast(0, 128)), row being the (1, N) tensor in HBM"
    )


def with_tensor_tensor(x: Any, row: Any) -> Any:
    tile = nl.load(x)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=row, op=nl.multiply)
    return stored(tile)


def test_a_row_for_all_partitions_is_loaded_into_all_of_them() -> None:
    error = refused(lambda x, row: with_tensor_tensor(x, nl.load(row)), (128, 16), (1, 16))
    assert (error.code, error.hint) == ("NKW-PARTITIONS-AGREE", row_hint("data2"))
    (x, row), out = launched(
        lambda x, row: with_tensor_tensor(x, nl.load(row.broadcast(0, 128))), (128, 16), (1, 16)
    )
    np.testing.assert_array_equal(out, x * row)
    error = refused(lambda x, row: stored(nl.multiply(nl.load(x), nl.load(row))), (128, 16), (1, 16))
    assert (error.code, error.hint) == ("NKW-NL-SHAPES", row_hint("an operand"))


def test_a_row_as_the_vector_operand_is_loaded_into_all_partitions() -> None:
    def kernel(x: Any, row: Any) -> Any:
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=nl.load(row))
        return stored(tile)

    error = refused(kernel, (128, 16), (1, 16))
    assert error.code == "NKW-VECTOR-OPERAND"
    assert error.hint == row_hint("operand0") + "; nisa.tensor_tensor then combines it with data"
    assert refused(kernel, (128, 16), (1, 1)).hint == row_hint("operand0")
    assert refused(kernel, (128, 16), (128, 2)).hint.startswith("take a column")
    (x, column), out = launched(kernel, (128, 16), (128, 1))
    np.testing.assert_array_equal(out, x * column)


def test_a_column_beside_a_tile_is_named() -> None:
    error = refused(lambda x, c: with_tensor_tensor(x, nl.load(c)), (128, 16), (128, 1))
    assert error.hint == (
        "data2 has one value per partition: give it as operand0 to nisa.tensor_scalar, or repeat it with "
        "data2.broadcast(1, 16)"
    )
    (x, column), out = launched(
        lambda x, c: with_tensor_tensor(x, nl.load(c).broadcast(1, 16)), (128, 16), (128, 1)
    )
    np.testing.assert_array_equal(out, x * column)


def test_a_row_on_chip_is_not_broadcast_over_partitions() -> None:
    error = refused(lambda row: stored(nl.load(row).broadcast(0, 128)), (1, 16))
    assert (
        error.hint == "load the row with nl.load(row.broadcast(0, 128)), row being the (1, N) tensor in HBM"
    )

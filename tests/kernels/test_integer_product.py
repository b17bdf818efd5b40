"""Products of 8-bit integers equal their definition bit for bit, and rows are quantised as theirs says."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from nki_kernels.projection import integer_product
from nki_kernels.projection.rows import spread
from nki_kernels.tiles import copy_bank, load, load_repeated, ranges
from nki_kernels.weights import wrap_matrix
from simulate.check import detect, gathered
from simulate.check.integer_products import list_lines
from tests.kernels.accuracy import TARGETS

BF16 = ml_dtypes.bfloat16
COLUMNS = 512


def run(kernel: Any, *arguments: Any, target: str = "trn2") -> Any:
    return simulate.World(target).launch(kernel, [(arguments, {})]).outputs[0]


def store(destination: Any, tile: Any) -> None:
    nisa.dma_copy(dst=destination, src=tile)


def multiply(rows: Any, weight: Any) -> Any:
    """Multiply int8 rows [T, K] by an int8 weight [K, N]: float32 [T, N]."""
    out = nl.ndarray((rows.shape[0], weight.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for start, end in ranges(0, rows.shape[0]):
        stationary = spread(load(rows[start:end], nl.bfloat16), False)
        for first, last in ranges(0, weight.shape[1], COLUMNS):
            sums = integer_product.sum_integer_products(stationary, wrap_matrix(weight[:, first:last]))
            tile = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=tile, src=sums)
            store(out[start:end, first:last], tile)
    return out


def project(x: Any, weight: Any, scales: Any) -> Any:
    """Quantise rows of x [T, K] per token, multiply by an int8 weight with scales of its columns: x's dtype [T, N]."""
    out = nl.ndarray((x.shape[0], weight.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    for start, end in ranges(0, x.shape[0]):
        numbers, row_scales = integer_product.quantise_rows_to_integers(load(x[start:end], x.dtype))
        stationary = spread(numbers, False)
        for first, last in ranges(0, weight.shape[1], COLUMNS):
            sums = integer_product.sum_integer_products(stationary, wrap_matrix(weight[:, first:last]))
            tile = nl.ndarray(sums.shape, dtype=x.dtype, buffer=nl.sbuf)
            column_scales = load_repeated(scales[:, first:last], end - start)
            copy_bank(tile, sums, 0, 0, row_scales, column_scales)
            store(out[start:end, first:last], tile)
    return out


def quantise(x: Any) -> Any:
    """Return the integers and scales of rows [T, n], at most 128."""
    tiles = integer_product.quantise_rows_to_integers(load(x, x.dtype))
    outs = [nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm) for tile in tiles]
    for out, tile in zip(outs, tiles):
        store(out, tile)
    return tuple(outs)


def draw(seed: int, *shape: int) -> np.ndarray:
    """Draw int8 numbers, each of -128 and 127 in one of eight places."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-128, 128, shape)
    return np.select([rng.random(shape) < 0.125, rng.random(shape) < 0.125], [-128, 127], numbers).astype(
        np.int8
    )


def define(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Compute the definition in Python integers, whose float32 sums are rounded one by one."""
    total = np.zeros((len(rows), weight.shape[1]), np.float32)
    for first in range(0, rows.shape[1], 1024):
        group, columns = (
            x.astype(object) for x in (rows[:, first : first + 1024], weight[first : first + 1024])
        )
        exact = group @ columns
        assert np.abs(exact).max() <= 2**24
        total = (total.astype(np.float64) + exact.astype(np.float64)).astype(np.float32)
    return total


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("tokens", "depth", "columns"),
    [
        *((1, depth, 3) for depth in (1, 127, 128, 129, 1023, 1024, 1025, 1152)),
        *((tokens, 200, 40) for tokens in (127, 128, 129)),
        *((5, 130, columns) for columns in (127, 128, 129, 511, 512, 513)),
        (3, 2177, 70),
        (2, 3072, 5),
    ],
)
def test_the_product_is_its_definition_bit_for_bit(
    target: str, tokens: int, depth: int, columns: int
) -> None:
    rows, weight = draw(1, tokens, depth), draw(2, depth, columns)
    product = run(multiply, rows, weight, target=target)
    np.testing.assert_array_equal(product, define(rows, weight))
    np.testing.assert_array_equal(integer_product.integer_product_reference(rows, weight), product)


@pytest.mark.parametrize("target", TARGETS)
def test_every_pair_of_codes_is_multiplied_exactly(target: str) -> None:
    codes = np.arange(-128, 128)
    product = run(multiply, codes.astype(np.int8)[:, None], codes.astype(np.int8)[None], target=target)
    np.testing.assert_array_equal(product, np.outer(codes, codes))


@pytest.mark.parametrize("target", TARGETS)
def test_extremes_are_exact_at_the_limit(target: str) -> None:
    for first, second, total in ((-128, -128, 2**24), (-128, 127, -1024 * 128 * 127)):
        rows, weight = np.full((2, 1024), first, np.int8), np.full((1024, 3), second, np.int8)
        np.testing.assert_array_equal(run(multiply, rows, weight, target=target), np.full((2, 3), total))


def test_a_sum_above_the_limit_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = np.full((1, 1152), -128, np.int8), np.full((1152, 1), -128, np.int8)
    rows[0, -1] = weight[-1, 0] = 127
    assert int(rows[0].astype(np.int64) @ weight[:, 0].astype(np.int64)) == 18_874_113
    in_two = run(multiply, rows, weight)
    monkeypatch.setattr(integer_product, "GROUP_BLOCKS", 9)
    in_one = run(multiply, rows, weight)
    assert in_one[0, 0] == in_two[0, 0] == 18_874_112, "no float32 is 18,874,113"


def test_groups_keep_what_one_group_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum passes 2^24, where it loses a one, and comes back; in groups nothing is lost."""
    rows, weight = np.full((1, 2048), -128, np.int8), np.full((2048, 1), -128, np.int8)
    rows[0, 1024:1152] = 0
    rows[0, 1024] = weight[1024, 0] = 1
    rows[0, 1152:] = 127
    exact = 2**24 + 1 - 896 * 127 * 128
    assert run(multiply, rows, weight)[0, 0] == exact
    monkeypatch.setattr(integer_product, "GROUP_BLOCKS", 16)
    assert run(multiply, rows, weight)[0, 0] == exact - 1


@pytest.mark.parametrize("target", TARGETS)
def test_check_proves_the_sums_and_finds_nothing(target: str) -> None:
    x = np.random.default_rng(3).standard_normal((3, 1152)).astype(BF16)
    scales = np.full((1, 8), 0.01, np.float32)
    with gathered() as seen:
        simulate.World(target).launch(project, [((x, draw(2, 1152, 8), scales), {})])
    ((launch, evidence),) = seen.launches
    assert detect(launch, evidence) == []
    proven = [line for line in list_lines(seen.launches) if line["groups"]]
    assert [(line["groups"], line["exact"], line["depth"]) for line in proven] == [(2, 2, 1024)]
    assert proven[0]["where"]["file"].endswith("integer_product.py")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(
    ("count", "columns"), [(2, 1), (127, 130), (128, 33), (3, 2048), (2, 2049), (2, 4100)]
)
def test_rows_become_integers_as_the_definition_says(
    target: str, dtype: Any, count: int, columns: int
) -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((count, columns)) * 2.0 ** rng.integers(-40, 40, (count, 1))).astype(dtype)
    x[0] = 0
    x[-1, 0] = -abs(x).max() * 2
    integers, scales = run(quantise, x, target=target)
    expected, expected_scales = integer_product.integer_rows_reference(x)
    np.testing.assert_array_equal(integers.astype(np.int64), expected)
    np.testing.assert_array_equal(scales, expected_scales)
    assert not expected[0].any() and (np.abs(expected[1:].astype(int)).max(axis=1) == 127).all()
    # An integer is off by half a step at most; quotients of a row, up to 127, have three roundings of 2^-24 before.
    errors = np.abs(expected.astype(np.float64) * scales - x.astype(np.float64))
    assert (errors <= scales * (0.5 + 127 * 4 * 2.0**-24)).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(("tokens", "depth", "columns"), [(1, 128, 5), (129, 200, 40), (3, 1152, 513)])
def test_a_projection_of_quantised_rows_is_its_definition(
    target: str, dtype: Any, tokens: int, depth: int, columns: int
) -> None:
    rng = np.random.default_rng(5)
    x, weight = rng.standard_normal((tokens, depth)).astype(dtype), draw(6, depth, columns)
    scales = rng.uniform(0.001, 0.02, (1, columns)).astype(np.float32)
    expected = integer_product.quantised_product_reference(x, weight, scales).astype(dtype)
    np.testing.assert_array_equal(run(project, x, weight, scales, target=target), expected)

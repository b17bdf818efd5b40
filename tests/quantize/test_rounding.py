"""Rounding of weights: nearest numbers, scales, GPTQ against an elimination without a factor, and folded factors."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from model.errors import ModelError
from model.quantize.calibration import InputStatistics
from model.quantize.containers import pack_integers
from model.quantize.folding import choose_smoothing, fold_norm, measure_product_error, search_factors
from model.quantize.gptq import round_with_products
from model.quantize.rounding import round_rows, round_to_nearest, spread
from model.quantize.schemes import SCHEMES, Numbers, Scheme

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
LEVELS = {
    Numbers.int8: np.arange(-127, 128),
    Numbers.int4: np.arange(-8, 8),
    Numbers.fp8: np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    Numbers.mxfp8: np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    Numbers.mxfp4: np.array([s * m for s in (-1, 1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]),
}
NEAREST = [name for name, scheme in SCHEMES.items() if not scheme.needs_calibration]


def draw_weight(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return normal numbers with rows of different sizes; row 1 is zero."""
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((rows, columns)) * np.exp2(generator.integers(-8, 3, (rows, 1)))
    weight[1] = 0
    return weight.astype(np.float32)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("name", NEAREST)
@pytest.mark.parametrize("columns", [96, 127, 128, 129])
def test_every_number_is_rounded_to_the_nearest_that_its_scale_has(
    name: str, columns: int, dtype: np.dtype
) -> None:
    scheme = SCHEMES[name]
    if scheme.group is not None and columns % scheme.group:
        columns = 160
    weight = draw_weight(5, columns)
    rounded = round_to_nearest(weight, scheme, dtype)
    levels = LEVELS[scheme.numbers]
    levels = levels[np.isfinite(levels)]
    scales = spread(rounded.scales, columns).astype(np.float64)
    nearest = np.abs(weight[:, :, None] - levels * scales[:, :, None]).min(axis=2)
    # The quotient in float32 may be rounded across the middle of two levels: by 2^-24 of the number.
    assert (np.abs(weight - rounded.widen()) <= nearest + 2.0**-22 * np.abs(weight)).all()
    assert np.isin(rounded.elements.astype(np.float64), levels).all() and not rounded.widen()[1].any()
    stored = rounded.scales.astype(dtype).astype(np.float32)
    assert np.array_equal(stored, rounded.scales) or scheme.group == 32
    if scheme.group == 32:
        assert np.array_equal(np.exp2(np.round(np.log2(rounded.scales))), rounded.scales)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_have_scales_of_their_own(group: int) -> None:
    weight = draw_weight(4, 256)
    weight[:, :group] *= 100
    rounded = round_to_nearest(weight, SCHEMES["int4"].with_group(group), FLOAT32)
    assert rounded.scales.shape == (4, 256 // group)
    alone = round_to_nearest(weight[:, group:].copy(), SCHEMES["int4"].with_group(group), FLOAT32)
    assert np.array_equal(rounded.scales[:, 1:], alone.scales)
    assert np.array_equal(rounded.elements[:, group:], alone.elements)


def test_the_scale_of_4_bits_has_less_error_than_one_that_clips_nothing() -> None:
    weight = draw_weight(32, 512)
    searched = np.square(weight - round_to_nearest(weight, SCHEMES["int4"], FLOAT32).widen()).sum(axis=1)
    scales = np.maximum(np.abs(weight).max(axis=1, keepdims=True) / 7.5, 1e-9)
    clip_free = np.square(weight - np.clip(np.rint(weight / scales), -8, 7) * scales).sum(axis=1)
    assert (searched <= clip_free * (1 + 1e-5)).all() and searched.sum() < 0.95 * clip_free.sum()


def eliminate(weight: np.ndarray, products: np.ndarray, scales: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the elements of GPTQ by its definition: each column's error moves by the inverse, which is eliminated."""
    remaining, elements = weight.astype(np.float64), np.zeros(weight.shape)
    damped = products.astype(np.float64)
    diagonal = np.where(np.diagonal(damped) == 0, 1, np.diagonal(damped))
    damped[np.diag_indices(len(damped))] = diagonal + 0.01 * diagonal.mean()
    inverse = np.linalg.inv(damped)
    for column in order:
        elements[:, column] = np.clip(np.rint(remaining[:, column] / scales[:, column]), -8, 7)
        error = remaining[:, column] - elements[:, column] * scales[:, column]
        remaining -= np.outer(error, inverse[column] / inverse[column, column])
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return elements


@pytest.mark.parametrize("orders_columns", [False, True])
@pytest.mark.parametrize(("columns", "group"), [(127, None), (129, None), (256, 128), (160, 32)])
def test_gptq_is_the_elimination_of_its_definition(
    columns: int, group: int | None, orders_columns: bool
) -> None:
    weight, scheme = draw_weight(6, columns), replace(SCHEMES["gptq"], group=group)
    generator = np.random.default_rng(1)
    rows = generator.standard_normal((300, columns)) @ generator.standard_normal((columns, columns)) * 0.1
    rows *= np.exp2(generator.integers(-2, 3, columns))
    rows[:, 3] = 0
    products = (rows.T @ rows).astype(np.float32)
    rounded = round_with_products(weight, products, scheme, FLOAT32, orders_columns=orders_columns)
    order = np.argsort(-np.diagonal(products), kind="stable") if orders_columns else np.arange(columns)
    expected = eliminate(weight, products, spread(rounded.scales, columns), order)
    # Both are float64; a number within 1e-9 of the middle of two levels may go either way, and then spreads.
    assert (rounded.elements == expected).mean() > 0.999
    nearest = round_to_nearest(weight, scheme, FLOAT32)
    assert np.array_equal(nearest.scales, rounded.scales)
    errors = [
        np.square(rows @ (weight - quantised).T).sum() for quantised in (rounded.widen(), nearest.widen())
    ]
    assert errors[0] < 0.8 * errors[1]


def test_inputs_that_are_all_alike_need_damping() -> None:
    weight, products = draw_weight(4, 16), np.ones((16, 16), np.float32)
    with pytest.raises(ModelError, match=r"16 columns are too alike for --damping 0"):
        round_with_products(weight, products, SCHEMES["gptq"], FLOAT32, damping=0.0)
    assert round_with_products(weight, products, SCHEMES["gptq"], FLOAT32).elements.shape == (4, 16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 127, 129])
def test_packed_integers_are_in_the_bits_of_their_places(bits: int, columns: int) -> None:
    low = -(1 << (bits - 1))
    elements = np.random.default_rng(2).integers(low, -low, (3, columns)).astype(np.int8)
    words = pack_integers(elements, bits).view(np.uint32)
    count = 32 // bits
    assert words.shape == (3, -(-columns // count)) and words.flags.c_contiguous
    for row, column in np.ndindex(elements.shape):
        word = int(words[row, column // count])
        assert (word >> bits * (column % count)) % (1 << bits) + low == elements[row, column]


@pytest.mark.parametrize("numbers", [Numbers.int8, Numbers.fp8])
def test_rows_have_their_own_scales(numbers: Numbers) -> None:
    x = draw_weight(5, 33)
    rounded = round_rows(x, numbers)
    assert np.array_equal(rounded[2:3], round_rows(x[2:3], numbers)) and not rounded[1].any()
    largest = np.abs(x).max(axis=1, keepdims=True)
    unit = largest / 254 if numbers is Numbers.int8 else np.maximum(np.abs(x) / 16, largest / 448 * 2.0**-10)
    assert (np.abs(rounded - x) <= unit * (1 + 1e-5)).all() and not np.array_equal(rounded, x)


def collect(x: np.ndarray) -> InputStatistics:
    inputs = InputStatistics(x.shape[1], has_products=True)
    inputs.add(x[:10])
    inputs.add(x[10:])
    return inputs


def test_statistics_are_those_of_all_rows() -> None:
    x = draw_weight(30, 12)
    inputs = collect(x)
    assert inputs.rows == 30 and np.array_equal(inputs.largest, np.abs(x).max(axis=0))
    np.testing.assert_allclose(inputs.sums, np.abs(x).sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(inputs.products, x.T @ x, rtol=1e-4, atol=1e-4)
    weight, second = draw_weight(4, 12, 5), draw_weight(4, 12, 6)
    error = np.square(x.astype(np.float64) @ (weight - second).T).sum()
    np.testing.assert_allclose(measure_product_error(weight, second, inputs), error, rtol=1e-4)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_folded_norms_change_no_product(offset: float, dtype: np.dtype) -> None:
    generator = np.random.default_rng(3)
    norm = generator.uniform(-0.5, 1.5, 40).astype(dtype).astype(np.float32)
    norm[4] = -offset
    factors = np.exp2(generator.uniform(-3, 3, 40)).astype(np.float32)
    folded, exact = fold_norm(norm, factors, offset, dtype)
    assert np.array_equal(folded.astype(dtype).astype(np.float32), folded)
    np.testing.assert_allclose((folded + offset) * exact, norm + np.float32(offset), rtol=1e-6)
    assert exact[4] == 1 and folded[4] == norm[4]
    if offset == 0:
        kept = np.arange(40) != 4
        np.testing.assert_allclose(exact[kept], factors[kept], rtol=2.0**-8)


def test_awq_makes_large_inputs_exacter() -> None:
    generator = np.random.default_rng(4)
    x = generator.standard_normal((200, 64)).astype(np.float32)
    x[:, :3] *= 30
    weights, inputs = [draw_weight(16, 64, 7), draw_weight(8, 64, 8)], collect(x)

    def round_weight(weight: np.ndarray) -> np.ndarray:
        return round_to_nearest(weight, SCHEMES["int4"], FLOAT32).widen()

    factors = search_factors(weights, inputs, round_weight)
    errors = [
        sum(np.square(x @ (weight - round_weight(weight * scale) / scale).T).sum() for weight in weights)
        for scale in (factors, np.ones(64, np.float32))
    ]
    assert errors[0] < 0.8 * errors[1] and factors[:3].min() > factors[3:].max()


def test_smoothing_makes_columns_of_inputs_alike() -> None:
    x = draw_weight(100, 32)
    x[:, 5] *= 100
    weights, inputs = [draw_weight(8, 32, 9)], collect(x)
    factors = choose_smoothing(weights, inputs)
    largest = np.abs(weights[0]).max(axis=0)
    np.testing.assert_allclose(factors, np.sqrt(inputs.largest / np.maximum(largest, 1e-4)), rtol=1e-5)
    weight, rows = weights[0] * factors, x / factors

    def measure(weight: np.ndarray, rows: np.ndarray) -> float:
        rounded = round_to_nearest(weight, SCHEMES["w8a8"], FLOAT32).widen()
        return float(np.square(round_rows(rows, Numbers.int8) @ rounded.T - x @ weights[0].T).sum())

    assert measure(weight, rows) < 0.5 * measure(weights[0], x)


@pytest.mark.parametrize(("name", "group"), [("fp8", 128), ("int4", 48), ("mxfp4", 64)])
def test_groups_that_a_scheme_lacks_are_refused(name: str, group: int) -> None:
    with pytest.raises(
        ModelError, match=rf"--group-size {group} with --scheme {name}: schemes with groups are"
    ):
        SCHEMES[name].with_group(group)
    same: Scheme = SCHEMES[name].with_group(None)
    assert same is SCHEMES[name] and SCHEMES["gptq"].with_group(64).group == 64

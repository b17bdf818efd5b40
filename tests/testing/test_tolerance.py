"""Derived tolerances: right arithmetic stays inside them, a lost digit does not."""

from __future__ import annotations

import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from nkw.errors import InvalidArgument
from simulate.testing import Mismatch, WeakComparison, compare, roundoff, tolerance

FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "float8_e4m3fn")
NUMPY = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in FLOATS}


@pytest.mark.parametrize("name", FLOATS)
def test_the_roundoff_is_half_the_distance_of_the_neighbours_of_one(name: str) -> None:
    one = np.array(1, NUMPY[name])
    bits = one.view(f"u{one.itemsize}") + 1
    above = float(bits.view(NUMPY[name]))
    assert roundoff(name) == (above - 1) / 2


@pytest.mark.parametrize("name", FLOATS)
def test_one_rounding_stays_inside_and_two_places_off_do_not(name: str) -> None:
    exact = np.linspace(0.5, 1, 1001)[
        :-1
    ]  # one binade, whose neighbours lie 2 u M apart for M = 0.5 and u M for M = 1
    rounded = exact.astype(NUMPY[name])
    compare(rounded, exact)
    off = rounded.copy()
    off[-1:] = (off[-1:].view(f"u{off.itemsize}") - 4).view(NUMPY[name])
    with pytest.raises(Mismatch, match="1 of 1000 elements beyond"):
        compare(off, exact)


@pytest.mark.parametrize("terms", [1, 2, 127, 128, 129, 4096])
def test_a_sum_of_products_in_float32_stays_inside(terms: int) -> None:
    random = np.random.default_rng(terms)
    a, b = (random.uniform(0.5, 1, terms).astype(np.float32) for _ in range(2))
    total = np.float32(0)
    for x, y in zip(a, b):
        total = np.float32(total + np.float32(x * y))
    exact = float(sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b)))
    compare(np.array([total]), np.array([exact]), contraction=terms)


def test_a_sum_kept_in_bfloat16_is_beyond_what_float32_allows() -> None:
    a = np.full(512, 1.0)
    total = np.array(0, ml_dtypes.bfloat16)
    for x in a:
        total = (total.astype(np.float32) + np.float32(x)).astype(ml_dtypes.bfloat16)
    with pytest.raises(Mismatch, match=r"256 for 512"):
        compare(total.reshape(1), np.array([512.0]), contraction=512)


def test_the_narrowest_dtype_on_the_way_counts() -> None:
    exact = np.linspace(0.5, 1, 100)
    through = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
    with pytest.raises(Mismatch):
        compare(through, exact, roundings=2)
    compare(through, exact, roundings=2, through="bfloat16")


def test_more_roundings_allow_more_and_none_is_refused() -> None:
    bounds = [tolerance("bfloat16", 1.0, roundings=count) for count in (1, 2, 3)]
    assert bounds == sorted(bounds) and bounds[0] < bounds[2]
    with pytest.raises(InvalidArgument, match="one rounding or more"):
        tolerance("bfloat16", 1.0, roundings=0)
    assert tolerance("bfloat16", 1.0, contraction=0) < tolerance("bfloat16", 1.0, contraction=1)
    with pytest.raises(InvalidArgument, match="a contraction of 0 or more"):
        tolerance("bfloat16", 1.0, contraction=-1)


def test_bounds_without_a_digit_are_refused() -> None:
    assert tolerance("float32", 1.0, contraction=2**21) < 1
    with pytest.raises(InvalidArgument, match="no digit of a result is reliable"):
        tolerance("float32", 1.0, contraction=2**23)


@pytest.mark.parametrize("name", ["int32", "bool_", "float8_e8m0fnu", "float8_e5m2_x4"])
def test_what_does_not_round_has_no_tolerance(name: str) -> None:
    with pytest.raises(InvalidArgument, match="compare them for equality"):
        tolerance(name, 1.0)


def test_integers_have_to_be_equal() -> None:
    compare(np.array([1, 2]), np.array([1, 2]))
    with pytest.raises(Mismatch, match="1 of 2 elements beyond"):
        compare(np.array([1, 3]), np.array([1, 2]))


def test_nan_and_infinity_have_their_places() -> None:
    odd = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    with pytest.warns(WeakComparison):
        compare(odd, odd.astype(np.float64))
    for index, value in ((0, 0.0), (1, -np.inf), (2, 0.0), (3, np.nan)):
        wrong = odd.copy()
        wrong[index] = value
        with pytest.raises(Mismatch, match="1 of 4 elements beyond"):
            compare(wrong, odd.astype(np.float64))


def test_shapes_have_to_be_equal() -> None:
    with pytest.raises(Mismatch, match=r"shape \(2, 1\), the reference \(2,\)"):
        compare(np.zeros((2, 1)), np.zeros(2))


def silent(output: np.ndarray, truth: np.ndarray, **options: int) -> None:
    """Compare, and fail on a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(output, truth, **options)


def test_nan_on_both_sides_is_warned_of() -> None:
    fp8 = NUMPY["float8_e4m3fn"]
    values = np.array([1, np.nan, np.nan, 2], fp8)
    with pytest.warns(WeakComparison, match="2 of 4 elements are NaN on both sides"):
        compare(values, values.astype(np.float64))
    silent(values[:1], values[:1].astype(np.float64))


def test_a_bound_as_large_as_the_truth_is_warned_of() -> None:
    truth = np.array([1.0, -0.25])
    widest = 1 - 2.0**-8  # g(R - 1, 2**-8) + 2**-8 = 1, see `tolerance`
    steps = int(widest / (1 + widest) * 256) + 1
    silent(truth.astype(NUMPY["bfloat16"]), truth, roundings=steps)
    with pytest.warns(WeakComparison, match="zeros would pass"):
        compare(np.zeros(2, NUMPY["bfloat16"]), truth, roundings=steps + 1)


def test_zeros_for_zeros_are_no_weak_comparison() -> None:
    silent(np.zeros(3, np.float32), np.zeros(3))

"""The values and sizes that a kernel is tried on, and the terms of its bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulate.verification.bound import _compute_median, call_reference, compute_truth, count_contractions
from simulate.verification.inputs import (
    Call,
    add_nan,
    clear_half,
    draw_large,
    draw_random,
    fill_zeros,
    vary_extents,
)


def test_values_of_the_trials() -> None:
    call = Call(
        (np.zeros((64, 8), np.float32), np.arange(64, dtype=np.int32)), {"w": np.zeros((1, 8), np.float16)}
    )
    first, second = draw_random(call, 0), draw_random(call, 1)
    for one, other, original in zip(first.arrays, second.arrays, call.arrays):
        assert (one.shape, one.dtype) == (original.shape, original.dtype)
        assert not np.array_equal(one, other)
    assert np.array_equal(np.sort(first.args[1]), call.args[1])
    assert np.abs(draw_large(call).args[0]).max() > 1000
    assert np.isfinite(np.square(draw_large(call).keywords["w"])).all()  # in float16
    assert not any(array.any() for array in fill_zeros(call).arrays)
    assert 0 < np.count_nonzero(clear_half(first).args[0]) < 512
    assert [np.isnan(array).sum() for array in add_nan(first).floats] == [1, 1]
    sizes = dict(vary_extents(call))
    assert list(sizes) == ["63", "65", "7", "9"]
    assert [array.shape for array in sizes["65"].arrays] == [(65, 8), (65,), (1, 8)]
    assert sizes["63"].args[1].max() == 62 and sizes["65"].args[1].max() == 63


def terms(reference: Any, *arguments: np.ndarray) -> tuple[float, int]:
    """Return magnitude and contraction of a reference's result."""
    call = draw_random(Call(arguments, {}), 0)
    contractions = count_contractions(reference, call, call_reference(reference, call))
    return compute_truth(reference, call, contractions).magnitudes[0], contractions[0]


def test_the_contraction_is_counted_in_the_reference() -> None:
    a, b = np.zeros((48, 32), np.float32), np.zeros((48, 16), np.float32)
    assert terms(lambda a: a + 1, a)[1] == 1
    assert terms(lambda a: a.sum(axis=1), a)[1] == 32
    assert terms(lambda a, b: a.T @ b, a, b)[1] == 96  # 48 elements of each
    assert terms(lambda a: np.nan_to_num(a).sum(axis=1), a)[1] == 48 + 32  # NaN shows nothing
    assert terms(lambda a: a.sum() * np.ones(1), a)[1] == 48 + 32  # no axis is contracted twice


def test_the_magnitude_is_the_condition_of_the_task() -> None:
    x = np.zeros((16, 16), np.float32)
    drawn = draw_random(Call((x,), {}), 0).args[0].astype(np.float64)
    assert terms(lambda x: 3 * x, x)[0] == pytest.approx(3 * np.abs(drawn).max())
    # exp(100 x) grows by a factor of 1 + 100 |x| d where x grows by 1 + d.
    assert terms(lambda x: np.exp(x * 100) * 1e-100, x)[0] == pytest.approx(
        (np.abs(drawn) * 100 * np.exp(drawn * 100) * 1e-100).max(), rel=1e-3
    )


def test_a_comparison_that_tips_over_is_no_condition() -> None:
    x = np.zeros((64, 64), np.float32)
    assert terms(lambda x: np.where(x > 0, 1.0, -1.0), x)[0] == 1.0


def test_the_median_of_three_is_numpys_also_with_nan_and_infinity() -> None:
    values = np.array([-np.inf, -1.0, 0.0, 2.0, np.inf, np.nan])
    three = np.array(np.meshgrid(values, values, values)).reshape(3, -1)
    assert np.array_equal(_compute_median(*three), np.median(three, axis=0), equal_nan=True)

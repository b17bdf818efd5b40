"""The accuracy check itself: it refuses a kernel with too large an error and accepts the others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.accuracy import compare, last_place, summed_in_order

TRUTH = np.array([[1.0, 2.0], [3.0, 4.0]])
BF16 = np.dtype(ml_dtypes.bfloat16)


def test_last_place_is_the_spacing_of_the_dtype() -> None:
    for magnitude in (0.75, 1.0, 5.0, 1e10):
        assert last_place(np.dtype(np.float32), magnitude) == np.spacing(np.float32(magnitude))
        assert last_place(BF16, magnitude) == float(np.spacing(BF16.type(magnitude)))


def test_accepts_an_error_of_one_last_place_where_numpy_is_exact() -> None:
    plain = TRUTH.astype(np.float32)
    compare(plain + last_place(plain.dtype, 4.0) * np.float32([[0, 1], [0, 0]]), TRUTH, plain)


def test_refuses_an_error_of_two_last_places_where_numpy_is_exact() -> None:
    plain = TRUTH.astype(np.float32)
    with pytest.raises(AssertionError, match=r"worst at \(0, 1\).*1 of 4 beyond"):
        compare(plain + 2 * last_place(plain.dtype, 4.0) * np.float32([[0, 1], [0, 0]]), TRUTH, plain)


def test_accepts_twice_the_error_of_numpy_and_refuses_thrice() -> None:
    off = np.full((2, 2), 2.0**-10, np.float32)
    plain = TRUTH.astype(np.float32) + off
    compare(TRUTH.astype(np.float32) + 2 * off, TRUTH, plain)
    with pytest.raises(AssertionError, match="4 of 4 beyond"):
        compare(TRUTH.astype(np.float32) + 3 * off, TRUTH, plain)


def test_numpy_counts_as_no_more_exact_than_a_sum_in_order() -> None:
    plain = TRUTH.astype(np.float32)
    off = np.full((2, 2), 2.0**-20, np.float32)
    compare(plain + 2 * off, TRUTH, plain, [plain + off])
    compare(plain + 3 * off, TRUTH, plain, [plain + off, plain + 2 * off])
    with pytest.raises(AssertionError, match="4 of 4 beyond"):
        compare(plain + 3 * off, TRUTH, plain, [plain + off])


def test_products_in_order_add_one_term_after_the_other() -> None:
    left = np.float32([[2.0**24, 1, 1, -(2.0**24)]])  # each 1 is lost beside 2^24
    for product in (
        summed_in_order(left) @ np.ones((4, 1), np.float32),
        left @ summed_in_order(np.ones((4, 1), np.float32)),
    ):
        assert product.shape == (1, 1) and product[0, 0] == 0
    assert (summed_in_order(left[:, ::-1]) @ np.ones((4, 1), np.float32))[0, 0] == 2


def test_products_in_random_orders_differ_and_survive_joins() -> None:
    left, ones = np.float32([[2.0**24, 1, 1, -(2.0**24)]]), np.ones((4, 1), np.float32)
    products = [float((summed_in_order(left, number) @ ones)[0, 0]) for number in range(9)]
    assert set(products) == {0.0, 2.0}
    for number in range(9):
        both = np.concatenate([summed_in_order(left, number)] * 2)
        assert (both @ ones)[:, 0].tolist() == [products[number]] * 2


def test_refuses_nan() -> None:
    plain = TRUTH.astype(np.float32)
    sick = plain.copy()
    sick[1, 0] = np.nan
    with pytest.raises(AssertionError, match="1 of 4 beyond"):
        compare(sick, TRUTH, plain)


def test_refuses_another_dtype_than_numpys() -> None:
    with pytest.raises(AssertionError):
        compare(TRUTH.astype(BF16), TRUTH, TRUTH.astype(np.float32))

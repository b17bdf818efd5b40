"""The digest of written bytes: equal bytes have equal digests, other bytes have others."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.check.footprint import _FEW_BYTES, _digest


def values(rows: int, columns: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 100, (rows, columns)).astype(dtype)


# Few bytes, the last size that counts as few, words of whole rows, and rows that are no whole words.
SIZES = [(1, 1), (8, 127), (8, 128), (128, 512), (127, 513), (1, 4096)]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_equal_bytes_have_equal_digests(rows, columns, dtype) -> None:
    array = values(rows, columns, dtype)
    assert _digest(array) == _digest(array.copy())


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_another_element_shows_wherever_it_is(rows, columns, dtype) -> None:
    array = values(rows, columns, dtype)
    for position in (0, array.size // 2, array.size - 1):
        other = array.copy()
        other.flat[position] += 1
        assert _digest(other) != _digest(array)


@pytest.mark.parametrize(("rows", "columns"), [(8, 127), (128, 512), (127, 514)])
def test_exchanged_elements_show(rows, columns) -> None:
    array = values(rows, columns)
    assert array.nbytes < _FEW_BYTES or rows > 8
    turned = array.copy()
    turned[0, [0, 2]] = turned[0, [2, 0]]  # two words of a row
    for other in (array[::-1].copy(), np.roll(array, 1, axis=1), np.roll(array, 2, axis=1), turned):
        assert _digest(other) != _digest(array)

"""Index expressions: numpy's advanced indexing, as far as an access pattern can express it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulate.beta1.isa as nisa
import simulate.beta1.language as nl
from nkw.errors import OutOfBounds, RuleViolation
from tests.beta1.kernels import run, stored, whole_numbers

X = whole_numbers(128, 60)


def test_arange_with_axes_indexes_as_numpy_does() -> None:
    def kernel(x):
        tile = nl.load(x)
        i_p, i_f = nl.arange(128)[:, None], nl.arange(20)[None, :]
        return stored(nl.copy(tile[i_p, 2 * i_f + 3]))

    assert np.array_equal(run(kernel, X), X[np.arange(128)[:, None], 2 * np.arange(20)[None, :] + 3])


def test_refuses_arange_without_axes() -> None:
    def kernel(x):
        return stored(nl.load(x[nl.arange(128), nl.arange(60)]))

    with pytest.raises(RuleViolation, match="partition axis and at least one free axis"):
        run(kernel, X)


def test_mgrid_is_dense_like_numpys() -> None:
    def kernel(x):
        grid = nl.mgrid[0:128, 0:4, 0:3]
        return stored(nisa.iota(100 * grid.p + 10 * grid.x + grid.y, nl.int32))

    p, x, y = np.mgrid[0:128, 0:4, 0:3]
    assert np.array_equal(run(kernel, X), 100 * p + 10 * x + y)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    steps=st.tuples(*[st.integers(-3, 3)] * 3),
    offset=st.integers(0, 30),
    rows=st.integers(0, 20),
)
def test_affine_access_of_hbm_is_numpys(sizes, steps, offset, rows) -> None:
    def index(library):
        a, b, c = library.mgrid[0 : sizes[0], 0 : sizes[1], 0 : sizes[2]]
        return a + rows, steps[0] * a + steps[1] * b + steps[2] * c + offset

    rows_np, columns = index(np)
    inside = columns.min() >= 0 and columns.max() < X.shape[1]

    def kernel(x):
        return stored(nl.load(x[index(nl)]))

    if inside:
        assert np.array_equal(run(kernel, X), X[rows_np, columns])
    else:
        with pytest.raises(OutOfBounds):
            run(kernel, X)


@pytest.mark.parametrize(("last", "inside"), [(58, True), (59, True), (60, False)])
def test_an_index_stays_inside_its_dim(last: int, inside: bool) -> None:
    def kernel(x):
        return stored(nl.load(x[nl.arange(128)[:, None], last - nl.arange(4)[None, :]]))

    if inside:
        assert np.array_equal(run(kernel, X), X[:, last - np.arange(4)])
    else:
        with pytest.raises(OutOfBounds, match="indices 57 to 60 on dim 1 of size 60"):
            run(kernel, X)


def test_refuses_slices_beside_indices() -> None:
    with pytest.raises(RuleViolation, match="slices cannot be mixed"):
        run(lambda x: stored(nl.load(x[nl.arange(128)[:, None], 0:60])), X)
    assert np.array_equal(run(lambda x: stored(nl.load(x[0:128, 5:9])), X), X[:, 5:9])


@pytest.mark.parametrize("spoil", [lambda i: i // 2, lambda i: i % 2, lambda i: i * 0.5, lambda i: i * i])
def test_refuses_an_index_that_is_not_affine(spoil) -> None:
    with pytest.raises(RuleViolation, match="affine"):
        spoil(nl.arange(8)[:, None])


def test_refuses_a_diagonal_on_chip_and_takes_it_from_hbm() -> None:
    i_p, i_f = nl.arange(8)[:, None], nl.arange(4)[None, :]
    diagonal = np.lib.stride_tricks.sliding_window_view(X[:8], 4, axis=1)[np.arange(8), np.arange(8)]

    assert np.array_equal(run(lambda x: stored(nl.load(x[i_p, i_p + i_f])), X), diagonal)
    with pytest.raises(RuleViolation, match="consecutive partitions"):
        run(lambda x: stored(nl.copy(nl.load(x)[i_p, i_p + i_f])), X)


@pytest.mark.parametrize("dims", [5, 6, 7])
def test_accesses_of_more_than_five_dims_are_split(dims: int) -> None:
    sizes = (8, *(2,) * (dims - 1))
    weights = [2**n for n in range(dims - 1)]

    def index(library):
        axes = library.mgrid[tuple(slice(0, size) for size in sizes)]
        column = axes[1] * weights[0]
        for axis, weight in zip(axes[2:], weights[1:]):
            column = column + axis * weight
        return axes[0], column

    data = whole_numbers(8, 64)

    def kernel(x):
        doubled = nl.load(x)[index(nl)] * 2.0
        out = nl.ndarray((8, 64), np.float32)
        out[...] = nl.load(x)
        out[index(nl)] = doubled
        return stored(out)

    expected = data.copy()
    expected[index(np)] *= 2
    assert np.array_equal(run(kernel, data), expected)


def test_rows_named_by_a_tile_are_gathered() -> None:
    rows = np.array([[5], [0], [99], [5]], np.int32)

    def kernel(x, r):
        names = nl.load(r)
        return stored(nl.load(x[names[nl.arange(4)[:, None], 0], nl.arange(60)[None, :]]))

    assert np.array_equal(run(kernel, X, rows), X[rows[:, 0]])
    with pytest.raises(OutOfBounds, match="index 128 is out of bounds"):
        run(kernel, X, np.where(rows == 99, 128, rows).astype(np.int32))

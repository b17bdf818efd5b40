"""Masks: what they leave out keeps its value in a target, and is undefined in a fresh tile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulate.beta1.isa as nisa
import simulate.beta1.language as nl
from nkw.errors import OutOfBounds, RuleViolation, Unsupported
from tests.beta1.kernels import issued, launched, run, stored, whole_numbers

COMPARE = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5)),
    conditions=st.lists(
        st.tuples(st.tuples(*[st.integers(-2, 2)] * 3), st.integers(-4, 8), st.sampled_from(sorted(COMPARE))),
        min_size=1,
        max_size=3,
    ),
)
def test_boxes_cover_exactly_what_the_mask_selects(shape, conditions) -> None:
    def mask(library):
        axes = library.mgrid[tuple(slice(0, size) for size in shape)]
        joined = None
        for steps, limit, name in conditions:
            condition = COMPARE[name](sum(axis * step for axis, step in zip(axes, steps)), limit)
            joined = condition if joined is None else joined & condition
        return joined

    seen = np.zeros(shape, int)
    for box in mask(nl).boxes(shape):
        seen[tuple(slice(start, end) for start, end in box)] += 1
    assert np.array_equal(seen, np.broadcast_to(mask(np), shape).astype(int))


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 200, 256, 257])
def test_a_ragged_last_tile_is_loaded_and_stored_under_a_mask(rows: int) -> None:
    data = whole_numbers(rows, 24)

    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        i_p, i_f = nl.mgrid[0:128, 0:24]
        for tile in nl.affine_range(-(-rows // 128)):
            row = tile * 128 + i_p
            doubled = nl.load(x[row, i_f], mask=row < rows) * 2.0
            nl.store(out[row, i_f], doubled, mask=row < rows)
        return out

    assert np.array_equal(run(kernel, data), 2 * data)


def test_without_the_mask_the_same_access_is_refused() -> None:
    with pytest.raises(OutOfBounds, match="mask the access"):
        run(
            lambda x: stored(nl.load(x[nl.arange(128)[:, None], nl.arange(24)[None, :]])),
            whole_numbers(127, 24),
        )


def _triangle(library):
    i_p, i_f = library.mgrid[0:128, 0:128]
    return i_p >= i_f


def test_a_triangle_on_chip_leaves_the_rest_of_its_target() -> None:
    data = whole_numbers(128, 128)

    def kernel(x):
        out = nl.full((128, 128), 77.0, np.float32)
        out[...] = nl.multiply(nl.load(x), 3.0, mask=_triangle(nl))
        return stored(out)

    launch = launched(kernel, data)
    assert np.array_equal(launch.outputs[0], np.where(_triangle(np), 3 * data, 77))
    assert {"affine_select", "tensor_copy_predicated"} <= set(issued(launch))


def test_a_triangle_of_a_dma_is_cut_into_rectangles() -> None:
    data = whole_numbers(128, 128)

    def kernel(x, out):
        nl.store(out, nl.load(x), mask=_triangle(nl))

    out = np.full((128, 128), 77, np.float32)
    run(kernel, data, out)
    assert np.array_equal(out, np.where(_triangle(np), data, 77))


def test_what_a_mask_leaves_out_of_a_fresh_tile_is_nan() -> None:
    def kernel(x):
        i_p, i_f = nl.mgrid[0:128, 0:8]
        return stored(nl.load(x[i_p, i_f], mask=i_p < 100))

    result = run(kernel, whole_numbers(128, 8))
    assert np.array_equal(result[:100], whole_numbers(128, 8)[:100]) and np.isnan(result[100:]).all()


def test_a_reduction_takes_a_rectangle_and_refuses_a_triangle() -> None:
    data = whole_numbers(128, 128)

    def kernel(x, mask):
        return stored(nl.sum(nl.load(x), axis=1, mask=mask))

    i_p, i_f = nl.mgrid[0:128, 0:128]
    assert np.array_equal(run(kernel, data, i_f < 50)[:, 0], data[:, :50].sum(1))
    with pytest.raises(RuleViolation, match="selects a rectangle"):
        run(kernel, data, i_p >= i_f)


def test_a_mean_divides_by_what_the_mask_selects() -> None:
    data = 8 * whole_numbers(16, 12)

    def kernel(x):
        return stored(nl.mean(nl.load(x), axis=1, mask=nl.mgrid[0:16, 0:12].x < 4))

    assert np.array_equal(run(kernel, data)[:, 0], data[:, :4].mean(1))


@pytest.mark.parametrize("rows", [127, 128, 129])
def test_a_slice_may_end_beyond_its_dim_where_a_mask_cuts_it(rows: int) -> None:
    data = whole_numbers(rows, 8)

    def kernel(x, masked):
        tile = nl.zeros((128, 8), np.float32)
        mask = nl.arange(128)[:, None] < rows if masked else None
        nisa.dma_copy(dst=tile, src=x[0:128, :], mask=mask)
        return stored(tile)

    expected = np.zeros((128, 8), np.float32)
    expected[: min(rows, 128)] = data[:128]
    assert np.array_equal(run(kernel, data, True), expected)
    if rows < 128:
        with pytest.raises(OutOfBounds, match="indices 0 to 127 on dim 0 of size 127"):
            run(kernel, data, False)


def test_a_mask_that_selects_nothing_issues_nothing() -> None:
    def kernel(x, mask):
        tile = nl.load(x)
        tile[...] = nl.multiply(tile, 2.0, mask=mask)
        return stored(tile)

    data = whole_numbers(4, 8)
    i_p, _ = nl.mgrid[0:4, 0:8]
    assert "tensor_scalar" in issued(launched(kernel, data, i_p < 1))
    for nothing in (i_p < 0, False):
        launch = launched(kernel, data, nothing)
        assert np.array_equal(launch.outputs[0], data) and "tensor_scalar" not in issued(launch)


@pytest.mark.parametrize("wrong", [lambda m: m | m, lambda m: ~m, bool, lambda m: m & 3])
def test_refuses_masks_joined_otherwise(wrong) -> None:
    mask = nl.arange(8)[:, None] < 4
    assert len((mask & mask & True).boxes((8, 1))) == 1
    with pytest.raises(RuleViolation, match="joined with &"):
        wrong(mask)


def test_refuses_a_mask_of_another_shape() -> None:
    with pytest.raises(RuleViolation, match="broadcast to the shape of the access"):
        run(lambda x: stored(nl.copy(nl.load(x), mask=nl.arange(9)[:, None] < 4)), whole_numbers(8, 8))


def test_matmul_takes_masks_of_loop_variables_only() -> None:
    data = whole_numbers(128, 128)

    def kernel(x, mask):
        tile = nl.load(x)
        total = nl.zeros((128, 128), np.float32, buffer=nl.psum)
        total += nisa.nc_matmul(tile, tile)
        total += nisa.nc_matmul(tile, tile, mask=mask)
        return stored(total)

    assert np.array_equal(run(kernel, data, False), data.T @ data)
    assert np.array_equal(run(kernel, data, True), 2 * data.T @ data)
    with pytest.raises(Unsupported, match="slice the operands"):
        run(kernel, data, nl.arange(128)[:, None] < 64)

"""Accumulation in PSUM, read through other views of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

import simulate

simulate.install("simulate")

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


def _halves_after_each_product(x):
    """Return the sum after one product and after two, seen as bfloat16 halves of its float32 elements."""
    tile = nl.load(x)
    bank = nl.ndarray((x.shape[1], x.shape[1]), dtype=nl.float32, buffer=nl.psum)
    seen = nl.ndarray((2, x.shape[1], 2 * x.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for step in range(2):
        nisa.nc_matmul(dst=bank, stationary=tile, moving=tile, accumulate=step > 0)
        halves = nl.ndarray((x.shape[1], 2 * x.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=halves, src=bank.view(nl.bfloat16))
        nisa.dma_copy(dst=seen[step], src=halves)
    return seen


@pytest.mark.parametrize("mode", [simulate.Mode.eager, simulate.Mode.replay])
def test_a_view_in_another_dtype_has_the_accumulated_sum(mode: simulate.Mode) -> None:
    x = np.full((1, 3), np.float32(1.5))
    world = simulate.World()
    for _ in range(2):
        (seen,) = world.launch(_halves_after_each_product, [((x,), {})], mode=mode).outputs
        for step in range(2):
            assert (seen[step, :, 1::2] == 2.25 * (step + 1)).all()


def _products_into(x, column_ranges, accumulate):
    tile = nl.load(x)
    bank = nl.ndarray((x.shape[1], x.shape[1]), dtype=nl.float32, buffer=nl.psum)
    for first, end in column_ranges:
        nisa.nc_matmul(
            dst=bank[:, first:end], stationary=tile, moving=tile[:, first:end], accumulate=accumulate
        )
    result = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=bank)
    out = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=result)
    return out


@pytest.mark.parametrize("columns", [127, 128])
@pytest.mark.parametrize(
    "column_ranges",
    [
        ((0, 64), (64, None)),
        ((0, 64), (64, None), (0, 64)),
        ((0, 64), (32, None)),  # adds to a part and writes the rest
        ((0, 64), (96, None), (32, 100), (0, None)),
        ((0, 2), (1, 3), (2, 4), (0, None)),
    ],
)
def test_the_first_write_of_every_element_overwrites_and_later_ones_add(columns: int, column_ranges) -> None:
    x = np.random.default_rng(0).integers(-4, 5, (16, columns)).astype(np.float32)
    column_ranges = tuple((first, columns if end is None else end) for first, end in column_ranges)
    times = np.zeros(columns)
    for first, end in column_ranges:
        times[first:end] += 1
    (out,) = simulate.launch(_products_into, [((x, column_ranges, None), {})]).outputs
    assert np.array_equal(out, (x.T @ x) * times)


def test_refuses_to_add_where_one_column_was_never_written() -> None:
    x = np.ones((16, 128), np.float32)
    with pytest.raises(simulate.NkwError, match="NKW-PSUM-UNSTARTED"):
        simulate.launch(_products_started, [((x, 127), {})])
    simulate.launch(_products_started, [((x, 128), {})])


def _products_started(x, written):
    tile = nl.load(x)
    bank = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=bank[:, 0:written], stationary=tile, moving=tile[:, 0:written], accumulate=False)
    nisa.nc_matmul(dst=bank, stationary=tile, moving=tile, accumulate=True)
    return x

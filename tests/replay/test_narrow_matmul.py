"""Matmuls of bfloat16 matrices without widening: by oneMKL, or by torch where there is no oneMKL."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest

import simulate
from nkw.errors import InvalidArgument
from simulate.replay import ReplayOptions
from simulate.replay.fusion import narrow_matmul as narrow
from simulate.replay.fusion import speed
from simulate.replay.fusion.blocked_matmul import choose_block_shape
from simulate.world import process_replays
from tests.replay.matmuls import assert_within_bound_of_sums, calls, tiled_product, whole_numbers

torch = pytest.importorskip("torch", reason="torch is an extra (speed)")
onemkl = pytest.mark.skipif(not speed.has_onemkl(), reason="this torch shows no oneMKL")

BF16 = ml_dtypes.bfloat16
LIBRARIES = [pytest.param("oneMKL", marks=onemkl), "torch"]


@pytest.fixture
def library(request) -> Iterator[str]:
    with speed.without_onemkl() if request.param == "torch" else nullcontext():
        yield request.param


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def turned(matrix: np.ndarray) -> np.ndarray:
    """Return the same matrix, its columns one after the other in memory."""
    return np.ascontiguousarray(matrix.T).T


def replays(operands: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs of an eager and of a rewritten launch."""
    world = simulate.World("trn2", replay=ReplayOptions(speed=True), replays=process_replays())
    modes = (simulate.Mode.eager, simulate.Mode.replay, simulate.Mode.replay)
    eager, _, replayed = (world.launch(tiled_product, [(operands, {})], mode).outputs[0] for mode in modes)
    return eager, replayed


# -- the products themselves --------------------------------------------------------------------------------------


@onemkl
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 300, 77), (127, 128, 129), (5, 1, 3), (1, 1, 1)])
@pytest.mark.parametrize("layouts", range(8))
def test_oneMKL_multiplies_every_layout(rows, depth, columns, layouts) -> None:
    """Inside larger arrays, rows or columns first."""

    def laid_out(bit: int, *shape: int) -> np.ndarray:
        around = normal(bit, *(extent + 2 for extent in shape))
        return (turned(around) if layouts & bit else around)[1:-1, 1:-1]

    left, right = (
        matrix.astype(BF16, order="K") for matrix in (laid_out(1, rows, depth), laid_out(2, depth, columns))
    )
    around = np.full((rows + 2, columns + 2), 7.0, np.float32)
    out = (turned(around) if layouts & 4 else around)[1:-1, 1:-1]
    everything = out.base if layouts & 4 else around
    speed.multiply(left, right, out)
    assert_within_bound_of_sums(out, left, right)
    out[...] = 7.0
    assert (everything == 7.0).all()


@pytest.mark.parametrize("depth", [4095, 4096, 4097])
@pytest.mark.parametrize("columns", [255, 256, 257])
def test_torch_multiplies_in_blocks(depth, columns) -> None:
    left, right = normal(1, 64, depth).astype(BF16), normal(2, depth, columns).astype(BF16)
    around = np.full((66, columns + 2), 7.0, np.float32)
    before = torch.get_float32_matmul_precision()
    speed.multiply_widened(left, right, around[1:-1, 1:-1], *choose_block_shape(64, depth, columns))
    assert torch.get_float32_matmul_precision() == before
    assert_within_bound_of_sums(around[1:-1, 1:-1], left, right)
    around[1:-1, 1:-1] = 7.0
    assert (around == 7.0).all()


def by_parts(left: np.ndarray, right: np.ndarray, at_once: int) -> np.ndarray:
    (rows, depth), columns = left.shape, right.shape[1]
    out = np.full((rows, columns), np.nan, np.float32)
    scratch = (
        np.full((3 * at_once, depth), 7, BF16),
        np.full((at_once, depth), np.nan, np.float32),
        np.full((3 * at_once, columns), np.nan, np.float32),
    )
    narrow.multiply(left, right, out, *scratch)
    return out


@pytest.mark.parametrize("magnitude", [-85, 0, 120])
def test_three_bfloat16_numbers_hold_a_float32(magnitude) -> None:
    values = np.ldexp(normal(1, 9, 301), magnitude).astype(np.float32)
    narrow_terms = np.empty((27, 301), BF16)
    narrow.split_float32(values, narrow_terms, np.empty_like(values))
    assert np.array_equal(narrow_terms.astype(np.float64).reshape(3, 9, 301).sum(0), values)


@onemkl
@pytest.mark.parametrize("at_once", [1, 128, 129])
def test_a_float32_matrix_is_multiplied_by_its_parts(at_once) -> None:
    left, right = normal(1, 129, 257), turned(normal(2, 257, 33).astype(BF16))
    assert_within_bound_of_sums(by_parts(left, right, at_once), left, right)


@onemkl
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, np.finfo(np.float32).max])
@pytest.mark.parametrize("where", ["left", "right"])
def test_numbers_without_parts_have_the_products_of_plain_multiplication(value, where) -> None:
    left, right = normal(1, 5, 64), normal(2, 64, 7).astype(BF16)
    (left if where == "left" else right)[3, 4] = value
    with np.errstate(all="ignore"):
        plain = left @ right.astype(np.float32)
    ours = by_parts(left, right, 5)
    finite = np.isfinite(plain)
    assert np.array_equal(ours[~finite], plain[~finite], equal_nan=True)
    assert np.isfinite(ours[finite]).all()


def test_nan_stays_nan_for_every_payload() -> None:
    values = np.array([[0x7F800001, 0xFFC00000, 0x7FFFFFFF]], np.uint32).view(np.float32)
    narrow_terms = np.empty((3, 3), BF16)
    narrow.split_float32(values, narrow_terms, np.empty_like(values))
    assert np.isnan(narrow_terms[0].astype(np.float32)).all() and not narrow_terms[1:].any()


# -- in rewritten programs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
@pytest.mark.parametrize("weights_left", [False, True])
def test_bfloat16_matrices_keep_their_float32_sums(cache, library, weights_left) -> None:
    """The sums are whole numbers beyond the 8 bits of bfloat16, so a rounded product would show."""
    operands = whole_numbers(1, 512, 128, dtype=BF16), whole_numbers(2, 512, 640, dtype=BF16)
    eager, replayed = replays(operands[::-1] if weights_left else operands)
    assert calls(cache).count("multiply" if library == "oneMKL" else "multiply_widened") == 1
    assert np.array_equal(eager, replayed)
    assert (replayed != replayed.astype(BF16)).any()


@onemkl
@pytest.mark.parametrize(("columns", "narrow"), [(63, False), (64, True), (65, True)])
def test_oneMKL_multiplies_above_a_size(cache, columns, narrow) -> None:
    eager, replayed = replays(
        (whole_numbers(1, 128, 32, dtype=BF16), whole_numbers(2, 128, columns, dtype=BF16))
    )
    assert ("multiply" in calls(cache)) == narrow
    assert np.array_equal(eager, replayed)


@pytest.mark.parametrize("library", ["torch"], indirect=True)
@pytest.mark.parametrize(("few", "narrow"), [(63, False), (64, True), (65, True)])
@pytest.mark.parametrize("weights_left", [False, True])
def test_torch_multiplies_where_both_operands_have_enough_rows(
    cache, library, few, narrow, weights_left
) -> None:
    x, weights = whole_numbers(1, 512, few, dtype=BF16), whole_numbers(2, 512, 640, dtype=BF16)
    assert few * weights.size >= 1 << 24 or not narrow
    eager, replayed = replays((weights, x) if weights_left else (x, weights))
    assert np.array_equal(eager, replayed)
    assert ("multiply_widened" in calls(cache)) == narrow


@onemkl
@pytest.mark.parametrize(("columns", "narrow"), [(1023, False), (1024, False), (1025, True)])
@pytest.mark.parametrize("weights_left", [False, True])
def test_a_large_narrow_matrix_is_multiplied_by_the_parts_of_a_float32_one(
    cache, columns, narrow, weights_left
) -> None:
    few, weights = normal(1, 1024, 5), normal(2, 1024, columns).astype(BF16)
    eager, replayed = replays((weights, few) if weights_left else (few, weights))
    (left, right) = (weights.T, few) if weights_left else (few.T, weights)
    assert_within_bound_of_sums(replayed, left, right)
    assert_within_bound_of_sums(eager, left, right)
    assert (calls(cache)[0] == "multiply") == narrow
    assert not narrow or "widen" not in calls(cache)


@onemkl
def test_products_of_parts_are_verified_against_eager(cache) -> None:
    world = simulate.World("trn2", replay=ReplayOptions(speed=True, verify=True), replays=process_replays())
    operands = normal(1, 1024, 129), normal(2, 1024, 1025).astype(BF16)
    for _ in range(2):
        world.launch(tiled_product, [(operands, {})], simulate.Mode.replay)
    assert cache.report.verified == 1 and "widen" not in calls(cache)


@pytest.mark.parametrize("library", ["torch"], indirect=True)
def test_without_oneMKL_a_large_narrow_matrix_is_widened_in_blocks(cache, library) -> None:
    eager, replayed = replays((whole_numbers(1, 1024, 5), whole_numbers(2, 1024, 1025, dtype=BF16)))
    assert np.array_equal(eager, replayed)
    assert "multiply" in calls(cache) and "multiply_widened" not in calls(cache)


# -- asking for it ------------------------------------------------------------------------------------------------


def test_speed_is_asked_for_by_name(monkeypatch) -> None:
    for text in ("", "numpy"):
        monkeypatch.setenv("NKW_SPEED", text)
        assert not ReplayOptions.from_environment().speed
    monkeypatch.setenv("NKW_SPEED", "mkl")
    with pytest.raises(InvalidArgument, match="NKW_SPEED is 'mkl'; set it to numpy or torch"):
        ReplayOptions.from_environment()
    monkeypatch.setenv("NKW_SPEED", "torch")
    monkeypatch.setattr(speed, "measure_relative_time", lambda: 0.5)
    assert ReplayOptions.from_environment().speed
    monkeypatch.setattr(speed, "is_torch_installed", lambda: False)
    speed.warn_of_absence.cache_clear()
    with pytest.warns(UserWarning, match=r"NKW_SPEED is torch, but torch is not installed: numpy multiplies"):
        assert not ReplayOptions.from_environment().speed
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert not ReplayOptions.from_environment().speed


@pytest.mark.parametrize(("relative", "faster"), [(0.99, True), (1.0, False), (1.44, False)])
def test_a_processor_without_fast_bfloat16_stays_with_numpy(monkeypatch, relative, faster) -> None:
    monkeypatch.setenv("NKW_SPEED", "torch")
    monkeypatch.setattr(speed, "is_torch_installed", lambda: True)
    monkeypatch.setattr(speed, "measure_relative_time", lambda: relative)
    speed.warn_of_slowness.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [ReplayOptions.from_environment().speed for _ in range(2)] == [faster, faster]
    assert [str(warning.message) for warning in caught] == (
        []
        if faster
        else [
            f"NKW_SPEED is torch, but this processor takes {relative:.1f} times as long for a bfloat16 product as for "
            "a float32 product: numpy multiplies"
        ]
    )


def test_the_processor_is_measured_once() -> None:
    pytest.importorskip("torch")
    speed.measure_relative_time.cache_clear()
    first = speed.measure_relative_time()
    assert 0 < first < float("inf") and speed.measure_relative_time() == first
    assert speed.measure_relative_time.cache_info().misses == 1

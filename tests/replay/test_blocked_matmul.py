"""Large matmuls of rewritten programs: weights widened in blocks, and provenance dropped after its last use."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import simulate
from simulate.numerics import as_dtype
from simulate.replay import Program, ReplayOptions
from simulate.replay.arena import Arena
from simulate.replay.fusion.blocked_matmul import LARGE, choose_block_shape, count_scratch_elements, multiply
from simulate.world import process_replays
from tests.replay.matmuls import assert_within_bound_of_sums, calls, tiled_product, whole_numbers

simulate.install("simulate")


BF16 = ml_dtypes.bfloat16


def multiplied(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Compute left @ right by blocks, into a part of a larger matrix whose other elements must not change."""
    (rows, depth), columns = left.shape, right.shape[1]
    scratch = np.full(count_scratch_elements(rows, depth, columns), np.nan, np.float32)
    around = np.full((rows + 2, columns + 2), 7.0, np.float32)
    multiply(as_dtype(right.dtype), left, right, around[1:-1, 1:-1], scratch)
    edges = around.copy()
    edges[1:-1, 1:-1] = 7.0
    assert (edges == 7.0).all()
    return around[1:-1, 1:-1]


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 129])
@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("turned", [False, True])
def test_blocked_matmuls_equal_whole_ones(rows, edge, turned) -> None:
    height, width = choose_block_shape(rows, 300, 1 << 20)
    depth, columns = (300, width + edge) if rows >= 16 else (height + edge, width + edge)
    generator = np.random.default_rng(rows)
    left = generator.standard_normal((rows, depth), np.float32)
    shape = (columns, depth) if turned else (depth, columns)
    right = generator.standard_normal(shape, np.float32).astype(BF16)
    right = right.T if turned else right
    assert_within_bound_of_sums(multiplied(left, right), left, right)


@pytest.mark.parametrize("depth", [4095, 4096, 4097])
@pytest.mark.parametrize("columns", [255, 256, 257])
def test_deep_sums_are_taken_in_parts(depth, columns) -> None:
    generator = np.random.default_rng(depth)
    left = generator.standard_normal((17, depth), np.float32)
    right = generator.standard_normal((depth, columns), np.float32).astype(BF16)
    assert_within_bound_of_sums(multiplied(left, right), left, right)


@pytest.mark.parametrize("dtype", [BF16, np.float16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3])
def test_elements_of_every_narrow_float_are_widened(dtype) -> None:
    generator = np.random.default_rng(0)
    left = generator.integers(-3, 4, (3, 130)).astype(np.float32)
    right = generator.integers(-3, 4, (130, 2050)).astype(dtype)
    assert np.array_equal(multiplied(left, right), left @ right.astype(np.float32))


@pytest.mark.parametrize("rows", [1, 128, 4096])
@pytest.mark.parametrize(("depth", "columns"), [(2048, 128256), (128256, 2048), (8192, 8192)])
def test_the_scratch_does_not_grow_with_the_matrix(rows, depth, columns) -> None:
    block = np.prod(choose_block_shape(rows, depth, columns))
    assert block <= 2 * LARGE
    width = choose_block_shape(rows, depth, columns)[1]
    assert count_scratch_elements(rows, depth, columns) - block in (0, rows * width)


@pytest.mark.parametrize(("columns", "blocked"), [(1023, False), (1024, False), (1025, True)])
@pytest.mark.parametrize("weights_left", [False, True])
def test_a_large_narrow_operand_is_never_widened_whole(cache, columns, blocked, weights_left) -> None:
    few, weights = whole_numbers(1, 1024, 5), whole_numbers(2, 1024, columns, dtype=BF16)
    assert (weights.size > LARGE) == blocked
    inputs = (weights, few) if weights_left else (few, weights)
    outputs = [
        simulate.World("trn2", replay=ReplayOptions(), replays=process_replays())
        .launch(tiled_product, [(inputs, {})], mode)
        .outputs[0]
        for mode in (simulate.Mode.eager, simulate.Mode.replay, simulate.Mode.replay)
    ]
    assert np.array_equal(outputs[0], outputs[2])
    assert ("multiply" in calls(cache)) == blocked
    assert cache.report.matmuls_fused > 0
    (program,) = cache.programs
    assert (program.fused._ranks[0].size < 4 * weights.size) == blocked


def test_rewriting_holds_the_tables_of_no_more_tiles_than_are_in_use() -> None:
    depth, columns = 1024, 2048
    inputs = whole_numbers(1, depth, 1), whole_numbers(2, depth, columns, dtype=BF16)
    program = Program(simulate.launch(tiled_product, [(inputs, {})]))
    tracemalloc.start()
    try:
        program.rewrite()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert program.why_not_fused is None
    # Every element of `b` has a place of 8 bytes in the table of a loaded tile and in that of a cast one; only a few
    # of the 64 tiles are in use at once, and reading one makes no more than some tables of its size.
    assert peak < 8 * depth * columns


def test_the_memory_of_buffers_begins_at_a_cache_line_and_is_made_once() -> None:
    arena = Arena()
    for size in (1, 63, 64, 65, 4097):
        block = arena.reserve(size)
        assert block.size >= size and block.ctypes.data % 64 == 0
        assert arena.reserve(size) is block and arena.reserve(1) is block

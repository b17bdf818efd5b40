"""matmul, lm_head and sample on a logical core of two physical ones: the bytes of one core, under every schedule."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import as_tuple, find_faults, normal, whole_numbers

BF16 = ml_dtypes.bfloat16
SCHEDULES = 64


def on_cores(kernel: Any, cores: int, *ranks: tuple[Any, ...]) -> list[tuple[np.ndarray, ...]]:
    """The outputs of every rank of a launch without findings; one on two cores is repeated under random schedules."""
    world = simulate.World("trn2", len(ranks), cores)
    done: list[simulate.Launch] = []
    given = [(arguments, {}) for arguments in ranks]
    seeds = SCHEDULES if cores > 1 else 0
    assert find_faults(lambda: done.append(world.launch(kernel, given)), seeds=seeds) == []
    return [as_tuple(output) for output in done[0].outputs]


def expect_same(kernel: Any, *ranks: tuple[Any, ...]) -> None:
    """Two cores return what one returns, byte for byte."""
    for one, two in zip(on_cores(kernel, 1, *ranks), on_cores(kernel, 2, *ranks), strict=True):
        for expected, got in zip(one, two, strict=True):
            assert got.dtype == expected.dtype
            assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("rows", "columns", "transposed"),
    [(3, 127, False), (3, 129, False), (129, 129, False), (257, 20, True), (3, 1025, False)],
)
def test_matmul_divides_columns_or_rows(rows: int, columns: int, transposed: bool) -> None:
    a, b = whole_numbers(1, rows, 140).astype(BF16), whole_numbers(2, 140, columns).astype(BF16)
    expect_same(kernels.matmul, (a.T.copy() if transposed else a, b, transposed))


def test_matmul_of_two_columns_is_divided_and_of_one_is_refused() -> None:
    a, b = whole_numbers(1, 3, 40), whole_numbers(2, 40, 2)
    expect_same(kernels.matmul, (a, b))
    with pytest.raises(AssertionError, match="2 cores divide at least 2 columns, not 1"):
        simulate.World("trn2", 1, 2).launch(kernels.matmul, [((a, b[:, :1].copy()), {})])


def head(rows: int, hidden: int, columns: int, top_k: int, first: int, seed: int = 3) -> tuple[Any, ...]:
    """Rows of 1 and -1, whose root mean square is 1, and whole weights: sums are exact, and many are equal."""
    x = np.random.default_rng(1).choice((-1.0, 1.0), (rows, hidden)).astype(np.float32)
    weights = whole_numbers(seed, hidden, columns)
    return x, np.ones((1, hidden), np.float32), weights, 0.0, top_k, np.int32([[first]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "hidden", "columns", "top_k"), [(1, 768, 1601, 8), (3, 40, 129, 24), (2, 24, 540, 264)]
)
def test_lm_head_divides_the_columns(rows: int, hidden: int, columns: int, top_k: int) -> None:
    expect_same(kernels.lm_head, head(rows, hidden, columns, top_k, 128000))


@pytest.mark.slow
def test_lm_head_of_two_cores_merges_over_ranks() -> None:
    group = ReplicaGroup([[0, 1]])
    expect_same(kernels.lm_head, *((*head(3, 40, 130, 24, 130 * rank, rank), group, 2) for rank in range(2)))


def test_two_cores_find_as_many_as_a_half_has_and_refuse_more() -> None:
    expect_same(kernels.lm_head, head(1, 16, 48, 24, 0))
    with pytest.raises(
        AssertionError, match=r"the largest 24 \(top_k 24, a multiple of 8\) of each half of 47"
    ):
        simulate.World("trn2", 1, 2).launch(kernels.lm_head, [(head(1, 16, 47, 24, 0), {})])


def drawn(rows: int, columns: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(rows)
    limits = [
        rng.choice(each, (rows, 1)).astype(np.float32)
        for each in ((0.0, 1.5), (1, 99), (0.9, 1.0), (0.0, 0.1))
    ]
    return normal(1, rows, columns), rng.random((rows, 1)).astype(np.float32), *limits, 16


def test_sample_divides_the_rows() -> None:
    given, rng = drawn(5, 300), np.random.default_rng(7)
    ids = rng.permuted(np.tile(np.arange(300, dtype=np.int32), (5, 1)), axis=1)
    counts = rng.choice((0, 0, 1, 2), (2, 5, 300)).astype(np.float32)
    penalties = (rng.choice(each, (5, 1)).astype(np.float32) for each in ((0.8, 1.3), (0.0, 0.7), (0.1, 0.4)))
    expect_same(kernels.sample, (*given, ids, normal(2, 5, 300), *counts, *penalties))


@pytest.mark.slow
def test_one_row_and_rows_over_ranks_are_sampled_by_the_first_core() -> None:
    expect_same(kernels.sample, drawn(1, 300))
    group, logits = ReplicaGroup([[0, 1]]), normal(1, 4, 200)
    ranks = (
        (logits[:, i : i + 100].copy(), *drawn(4, 100)[1:], *(None,) * 7, np.int32([[i]]), group, 2)
        for i in (0, 100)
    )
    expect_same(kernels.sample, *ranks)

"""lm_head: logits, and the largest of them with their ids, over pieces and ranks, with ties in the order of ids."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from simulate.errors import RuleViolation
from tests.kernels.accuracy import ODD_SIZES, TARGETS, compare, compare_all, in_float64, normal, run

BF16 = ml_dtypes.bfloat16
EPS = 1e-5


def arguments(
    rows: int,
    hidden: int,
    columns: int,
    top_k: int,
    x: Any = np.float32,
    w: Any = np.float32,
    first_id: int = 0,
) -> tuple[Any, ...]:
    head = normal(3, hidden, columns, dtype=w, scale=hidden**-0.5)
    return (
        normal(1, rows, hidden, dtype=x),
        normal(2, 1, hidden, dtype=w),
        head,
        EPS,
        top_k,
        np.int32([[first_id]]),
    )


def largest(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and columns of the largest, lowest column first among equals."""
    columns = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(logits, columns, axis=1), columns


def check(given: tuple[Any, ...], target: str = "trn1") -> None:
    logits, values, ids = run(kernels.lm_head, given, target)
    compare_all([logits], lambda *own: kernels.lm_head_reference(*own)[:1], given)
    count = -(-given[4] // 8) * 8
    assert values.shape == ids.shape == (given[0].shape[0], count)
    expected_values, expected_columns = largest(logits, count)
    assert np.array_equal(values, expected_values)
    assert ids.dtype == np.int32
    assert np.array_equal(ids, expected_columns + given[5][0, 0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("w", [np.float32, BF16])
def test_weights_on_every_chip(target: str, w: type) -> None:
    check(arguments(1, 172, 600, 8, np.float32, w), target)


def test_rows_in_bfloat16() -> None:
    x, norm, head, eps, top_k, offset = arguments(3, 172, 600, 8, BF16, BF16)
    logits, values, ids = run(kernels.lm_head, (x, norm, head, eps, top_k, offset))
    assert logits.dtype == np.float32
    # The normalised rows are stored in bfloat16 before the product, as numpy would store them.
    stored = kernels.rmsnorm_reference(x, norm, eps).astype(np.float32) @ head.astype(np.float32)
    exact = kernels.lm_head_reference(*(in_float64(a) for a in (x, norm, head, eps, top_k, offset)))[0]
    compare(logits, exact, stored)
    assert np.array_equal(values, largest(logits, 8)[0])
    assert np.array_equal(ids, largest(logits, 8)[1])


@pytest.mark.parametrize("rows", [1, 2, 31, 33, 42, 43, 64, 65, 127, 128])
def test_rows_up_to_a_tile(rows: int) -> None:
    check(arguments(rows, 40, 50, 8))


@pytest.mark.parametrize("columns", ODD_SIZES)
def test_vocabularies_of_any_size(columns: int) -> None:
    check(arguments(2, 40, columns, 1))


@pytest.mark.parametrize("top_k", [1, 7, 8, 9, 40, 64])
def test_top_k_is_rounded_up_to_a_multiple_of_eight(top_k: int) -> None:
    check(arguments(2, 24, 200, top_k))


def test_top_k_of_the_whole_vocabulary() -> None:
    check(arguments(2, 24, 64, 64))


@pytest.mark.parametrize("columns", [2047, 2048, 2049, 2063, 40000])
def test_vocabularies_around_and_beyond_one_piece(columns: int) -> None:
    """Two rows have four chunks of 512 columns in a piece."""
    check(arguments(2, 8, columns, 16, first_id=5))


def test_top_k_beyond_the_columns_of_a_chunk() -> None:
    check(arguments(2, 8, 4100, 600))


def test_ids_begin_at_the_offset() -> None:
    check(arguments(1, 24, 100, 8, first_id=128000))


@pytest.mark.parametrize("columns", [767, 768, 769, 1151, 1152, 1153, 3000])
@pytest.mark.parametrize("rows", [1, 65])
def test_vocabularies_whose_last_columns_are_searched_as_rows(rows: int, columns: int) -> None:
    """From 96 times the values wanted on, the hidden size makes loads slower than searches."""
    check(arguments(rows, 768, columns, 8, first_id=5))


def test_equal_logits_of_the_last_columns_come_lowest_id_first() -> None:
    row, _, head = tied(1200, 3)
    given = row.repeat(768, axis=1), row.repeat(768, axis=1), head.repeat(768, axis=0)
    _, values, ids = run(kernels.lm_head, (*given, 0.0, 8, np.int32([[0]])))
    assert np.array_equal(values, largest(768 * head, 8)[0])
    assert np.array_equal(ids, largest(head, 8)[1])


def tied(columns: int, distinct: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row of one element, and a head whose logits are few whole numbers that occur many times."""
    head = np.random.default_rng(4).integers(0, distinct, (1, columns)).astype(np.float32)
    return np.ones((1, 1), np.float32), np.ones((1, 1), np.float32), head


@pytest.mark.parametrize("top_k", [8, 24, 64])
@pytest.mark.parametrize("columns", [100, 2048, 5001])
def test_equal_logits_come_lowest_id_first(columns: int, top_k: int) -> None:
    x, norm, head = tied(columns, 3)
    _, values, ids = run(kernels.lm_head, (x, norm, head, 0.0, top_k, np.int32([[0]])))
    expected_values, expected_ids = largest(head, top_k)
    assert np.array_equal(values, expected_values)
    assert np.array_equal(ids, expected_ids)


def over_ranks(
    x: np.ndarray,
    norm: np.ndarray,
    head: np.ndarray,
    eps: float,
    top_k: int,
    cuts: list[int],
    **options: float,
) -> simulate.Launch:
    """One launch with the columns of `head` cut into the ranks' parts at `cuts`."""
    edges = [0, *cuts, head.shape[1]]
    group = ReplicaGroup([list(range(len(edges) - 1))])
    given = [
        ((x, norm, head[:, a:b].copy(), eps, top_k, np.int32([[a]]), group, len(edges) - 1), options)
        for a, b in pairwise(edges)
    ]
    return simulate.World("trn1", ranks=len(given)).launch(kernels.lm_head, given)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("top_k", [1, 24])
def test_every_rank_gets_the_largest_of_all_ranks(ranks: int, top_k: int) -> None:
    x, norm, head, eps, _, _ = arguments(3, 24, 100 * ranks, top_k)
    launch = over_ranks(x, norm, head, eps, top_k, [100 * r for r in range(1, ranks)])
    logits = np.concatenate([output[0] for output in launch.outputs], axis=1)
    values, columns = largest(logits, -(-top_k // 8) * 8)
    for output in launch.outputs:
        assert np.array_equal(output[1], values)
        assert np.array_equal(output[2], columns)


@pytest.mark.parametrize("cuts", [[50], [30, 60, 90], [17000]])
def test_equal_logits_of_several_ranks_come_lowest_id_first(cuts: list[int]) -> None:
    x, norm, head = tied(2 * cuts[-1] - 10, 3)
    launch = over_ranks(x, norm, head, 0.0, 24, cuts)
    values, columns = largest(head, 24)
    for output in launch.outputs:
        assert np.array_equal(output[1], values)
        assert np.array_equal(output[2], columns)


def test_last_rank_may_have_a_smaller_part() -> None:
    x, norm, head, eps, _, _ = arguments(2, 24, 97, 8)
    launch = over_ranks(x, norm, head, eps, 8, [50])
    logits = np.concatenate([output[0] for output in launch.outputs], axis=1)
    assert np.array_equal(launch.outputs[1][2], largest(logits, 8)[1])


@pytest.mark.parametrize("options", [{}, {"softcap": 0.5}])
@pytest.mark.parametrize("cuts", [[1], [7, 8], [5, 10, 15, 20], list(range(1, 9))])
def test_parts_of_fewer_than_eight_columns_give_no_padding(
    cuts: list[int], options: dict[str, float]
) -> None:
    """All but one logit are as low as a cap makes any, and padding before them; equal ones come lowest id first."""
    one, head = np.ones((1, 1), np.float32), np.full((1, cuts[-1] + 3), -1e6, np.float32)
    head[0, cuts[0]] = 1
    launch = over_ranks(one, one, head, 0.0, 8, cuts, **options)
    logits = np.concatenate([output[0] for output in launch.outputs], axis=1)
    values, columns = largest(logits, 8)
    for output in launch.outputs:
        assert np.array_equal(output[1][:, : values.shape[1]], values)
        assert np.array_equal(output[2][:, : values.shape[1]], columns)


def test_the_number_of_ranks_is_that_of_the_group() -> None:
    given = *arguments(1, 16, 24, 8), ReplicaGroup([[0]])
    for ranks in (0, 2):
        with pytest.raises((AssertionError, RuleViolation), match=r"num_ranks is 0|all_gather over 1 ranks"):
            run(kernels.lm_head, (*given, ranks))
    with pytest.raises(AssertionError, match="2 ranks, but no replica_group"):
        run(kernels.lm_head, (*given[:-1], None, 2))
    assert np.array_equal(run(kernels.lm_head, (*given, 1))[2], run(kernels.lm_head, given[:-1])[2])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_layer_norm_with_an_offset_and_capped_logits(target: str, dtype: type) -> None:
    """The cap is so low that it bends most logits; 1001 columns leave padding, which a cap must not lift."""
    given = arguments(3, 172, 1001, 16, dtype, dtype)
    options = {"softcap": 0.5, "norm_bias": normal(5, 1, 172, dtype=dtype), "norm_offset": 1.0}
    launch = simulate.World(target).launch(kernels.lm_head, [(given, options)])
    logits, values, ids = launch.outputs[0]
    wide = {name: in_float64(option) for name, option in options.items()}
    exact = kernels.lm_head_reference(*(in_float64(each) for each in given), **wide)[0]
    compare(logits, exact, kernels.lm_head_reference(*given, **options)[0])
    assert 0.4 < np.abs(logits).max() <= 0.5
    assert np.array_equal(values, largest(logits, 16)[0])
    assert np.array_equal(ids, largest(logits, 16)[1])


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_scaled_logits(softcap: float | None) -> None:
    given = arguments(3, 172, 1001, 16)
    options = {"softcap": softcap, "scale": 3.0}
    logits, values, ids = simulate.World("trn2").launch(kernels.lm_head, [(given, options)]).outputs[0]
    exact = kernels.lm_head_reference(*(in_float64(each) for each in given), **options)[0]
    compare(logits, exact, kernels.lm_head_reference(*given, **options)[0])
    assert np.array_equal(values, largest(logits, 16)[0])
    assert np.array_equal(ids, largest(logits, 16)[1])


def test_padding_stays_below_the_lowest_logits() -> None:
    """All logits are far below zero, where padding of zeros would win."""
    columns = 2050
    head = -np.random.default_rng(6).uniform(1e30, 1e38, (1, columns)).astype(np.float32)
    one = np.ones((1, 1), np.float32)
    _, values, ids = run(kernels.lm_head, (one, one, head, 0.0, 16, np.int32([[0]])))
    assert np.array_equal(values, largest(head, 16)[0])
    assert np.array_equal(ids, largest(head, 16)[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_leaves_the_others_alone(bad: float) -> None:
    x, norm, head, eps, top_k, offset = arguments(3, 172, 600, 8)
    alone = run(kernels.lm_head, (x, norm, head, eps, top_k, offset))
    x[1, 5] = bad
    for one, other in zip(alone, run(kernels.lm_head, (x, norm, head, eps, top_k, offset))):
        assert np.array_equal(one[[0, 2]], other[[0, 2]])


def test_refuses_what_does_not_fit() -> None:
    x, norm, head, eps, top_k, offset = arguments(3, 16, 24, 8)
    for given, sentence in (
        ((x, norm[:, 1:].copy(), head, eps, top_k, offset), r"norm_weight is \[1, 16\], not \(1, 15\)"),
        ((x, norm, head[1:], eps, top_k, offset), "w_head has 15 rows for a hidden size of 16"),
        ((x, norm, head, eps, 0, offset), "top_k is 0; at least 1 is wanted"),
        ((x, norm, head, eps, top_k, offset[0]), r"vocab_offset is \[1, 1\], not \(1,\)"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            run(kernels.lm_head, given)


def test_takes_as_many_as_there_are_and_refuses_more() -> None:
    check(arguments(1, 16, 24, 24))
    with pytest.raises(AssertionError, match=r"the largest 32 \(top_k 25, a multiple of 8\) of 24 columns"):
        run(kernels.lm_head, arguments(1, 16, 24, 25))
    over_ranks(*arguments(1, 16, 50, 24)[:5], cuts=[33])
    with pytest.raises(AssertionError, match=r"the largest 24 \(top_k 24, a multiple of 8\) of 16 columns"):
        over_ranks(*arguments(1, 16, 50, 24)[:5], cuts=[34])


def test_takes_1024_of_one_rank_and_refuses_more() -> None:
    check(arguments(1, 4, 2000, 1024))
    with pytest.raises(AssertionError, match="lm_head finds at most the largest 1024, not 1032"):
        run(kernels.lm_head, arguments(1, 4, 2000, 1025))


def test_takes_8192_candidates_of_all_ranks_and_refuses_more() -> None:
    for ranks in (8, 9):
        group = ReplicaGroup([list(range(ranks))])
        given = [((*arguments(128, 4, 2000, 1024), group, ranks), {})] * ranks
        world = simulate.World("trn1", ranks=ranks)
        if ranks == 8:
            world.launch(kernels.lm_head, given, mode=simulate.Mode.dry)
        else:
            with pytest.raises(AssertionError, match="1024 of 9 ranks are more than 8192 candidates"):
                world.launch(kernels.lm_head, given, mode=simulate.Mode.dry)


def test_takes_128_rows_and_refuses_129() -> None:
    check(arguments(128, 16, 24, 8))
    with pytest.raises(AssertionError, match="lm_head takes at most 128 rows, not 129"):
        run(kernels.lm_head, arguments(129, 16, 24, 8))


@pytest.mark.slow
@pytest.mark.parametrize("x", [np.float32, BF16])
def test_the_largest_sizes_fit_on_the_smallest_chip(x: type) -> None:
    """Planned and placed without computing numbers; a launch refuses tiles that do not fit."""
    given = np.empty((128, 8192), x), np.empty((1, 8192), BF16), np.empty((8192, 32768), BF16)
    offset = np.zeros((1, 1), np.int32)
    simulate.World("trn1").launch(kernels.lm_head, [((*given, EPS, 512, offset), {})], mode=simulate.Mode.dry)

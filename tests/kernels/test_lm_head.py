"""lm_head: logits, and the largest of them with their ids, over pieces and ranks, with ties in the order of ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import (
    ODD_SIZES,
    compare,
    compare_all,
    find_faults,
    in_float64,
    in_order,
    named,
    normal,
    run,
    whole_numbers,
)
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Undefined,
    limit,
    refuse,
    slow,
    together,
    vary,
)
from tests.kernels.test_feed_forward import FP8, INT8, quantise


def arguments(
    rows: int = 2,
    hidden: int = 24,
    columns: int = 40,
    top_k: int = 8,
    dtype: Any = F32,
    weights: Any = None,
    first_id: int = 0,
) -> tuple[Any, ...]:
    weight_dtype = weights or dtype
    return (
        normal(1, rows, hidden, dtype=dtype),
        normal(2, 1, hidden, dtype=weight_dtype),
        normal(3, hidden, columns, dtype=weight_dtype, scale=hidden**-0.5),
        1e-5,
        top_k,
        np.int32([[first_id]]),
    )


def largest(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values and columns of the largest, lowest column first among equals."""
    columns = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(logits, columns, axis=1), columns


def ordered(outputs: Sequence[np.ndarray], reference: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Assert logits as near as numpy's; values and ids are exactly the largest of these logits."""
    logits, values, ids = outputs
    if inputs[0].dtype == BF16 and inputs[9] is None:
        # The normalised rows are stored in bfloat16 before the product, as numpy would store them.
        weight = inputs[2].astype(F32) * (1 if inputs[12] is None else inputs[12])
        stored = kernels.rmsnorm_reference(*inputs[:2], inputs[3]).astype(F32) @ weight
        compare(logits, reference(*map(in_float64, inputs))[0], stored)
    else:
        compare_all([logits], lambda *operands: reference(*operands)[:1], inputs)
    expected_values, expected_columns = largest(logits, -(-inputs[4] // 8) * 8)
    assert values.shape == expected_values.shape and np.array_equal(values, expected_values)
    assert ids.dtype == np.int32 and np.array_equal(ids, expected_columns + inputs[5][0, 0])


def bent(dtype: type) -> dict[str, Any]:
    """Return a cap so low that it bends most logits; 1001 columns leave padding, which a cap must not lift."""
    return dict(softcap=0.5, norm_bias=normal(5, 1, 172, dtype=dtype), norm_offset=1.0, dtype=dtype)


TAIL = vary(columns=[767, 768, 769, 1151, 1152, 1153, 3000], rows=[1, 65], hidden=768, first_id=5)
"""From 96 times the values wanted on, the hidden size makes loads slower than searches of the last columns as rows."""


class TestLmHead(KernelTests):
    """Two rows have four chunks of 512 columns in a piece of a vocabulary; top_k is rounded up to a multiple of 8."""

    case = KernelCase(
        kernels.lm_head,
        arguments,
        values=[
            dict(rows=3, hidden=172, columns=600, dtype=BF16),
            *vary(rows=1, hidden=172, columns=600, weights=[*DTYPES]),
            *(dict(rows=3, hidden=172, columns=1001, top_k=16) | bent(dtype) for dtype in DTYPES),
            *vary(rows=[1, 2, 31, 33, 42, 43, 64, 65, 127, 128], hidden=40, columns=50),
            *vary(hidden=40, columns=[*ODD_SIZES], top_k=1),
            *vary(columns=200, top_k=[1, 7, 8, 9, 40, 64]),
            dict(columns=64, top_k=64),
            *vary(hidden=8, columns=[2047, 2048, 2049, 2063, 40000], top_k=16, first_id=5),
            dict(hidden=8, columns=4100, top_k=600),
            dict(rows=1, columns=100, first_id=128000),
            *vary(rows=3, hidden=172, columns=1001, top_k=16, softcap=[None, 2.0], scale=3.0),
        ],
        every_chip=TAIL,
        refusals=[
            refuse("norm_weight has to be [1, 24], not (1, 23)", norm_weight=normal(1, 1, 23)),
            refuse("w_head has 23 rows for a hidden size of 24", w_head=lambda w: w[1:]),
            refuse("top_k is 0; give at least 1", dict(top_k=1), top_k=0),
            refuse("vocab_offset has to be [1, 1], not (1,)", vocab_offset=np.int32([0])),
            refuse("num_ranks is 2 without a replica_group: give the group", num_ranks=2),
            refuse("num_ranks is 0", dict(replica_group=ReplicaGroup([[0]])), num_ranks=0),
            refuse("all_gather over 1 ranks", dict(replica_group=ReplicaGroup([[0]])), num_ranks=2),
        ],
        limits=[
            limit(
                "top_k",
                24,
                "w_head has no more than 24 columns: the largest 32 (top_k 25, rounded up",
                rows=1,
                hidden=16,
                columns=24,
            ),
            limit(
                "top_k",
                1024,
                "lm_head finds at most the largest 1024, not 1032",
                rows=1,
                hidden=4,
                columns=2000,
            ),
            limit("rows", 128, "lm_head takes at most 128 rows, not 129", hidden=16, columns=24),
        ],
        fits=slow(*vary(rows=128, hidden=8192, columns=32768, top_k=512, dtype=[*DTYPES], weights=BF16)),
        undefined=[
            Undefined(dict(x=(1, 5)), dict(rows=3, hidden=172, columns=600), value, rows=[1])
            for value in (np.nan, np.inf)
        ],
        tolerance=ordered,
    )


def scaled(
    rows: int = 2,
    hidden: int = 24,
    columns: int = 40,
    top_k: int = 8,
    dtype: Any = BF16,
    first_id: int = 0,
    elements: Any = FP8,
) -> tuple[Any, ...]:
    """Return arguments whose w_head has elements of 8 bits and a scale for each column."""
    inputs = named(kernels.lm_head, arguments(rows, hidden, columns, top_k, dtype, first_id=first_id))
    inputs["w_head"], inputs["w_head_scales"] = quantise(inputs["w_head"].astype(F32), elements)
    return in_order(kernels.lm_head, **inputs)


class TestScaledLmHead(KernelTests):
    """Weights of 8 bits with a scale for each column, searched in chunks and as rows, with padding."""

    case = KernelCase(
        kernels.lm_head,
        scaled,
        values=[
            *vary(rows=[1, 3, 33, 65, 128], hidden=172, columns=[600, 1001], elements=[FP8, INT8]),
            *vary(rows=3, hidden=172, columns=1001, dtype=[*DTYPES], softcap=[None, 2.0], scale=[1.0, 3.0]),
            *vary(hidden=40, columns=[*ODD_SIZES], top_k=1),
        ],
        every_chip=vary(columns=[769, 1153], rows=[1, 33], hidden=768, first_id=5),
        refusals=[
            refuse(
                "w_head_scales is float32 [1, 40], one for each column of w_head, not float32 (40, 1)",
                w_head_scales=lambda scales: scales.T,
            )
        ],
        fits=slow(dict(rows=128, hidden=8192, columns=32768, top_k=512)),
        tolerance=ordered,
    )


def test_two_cores_and_ranks_find_the_largest_scaled_logits() -> None:
    """Whole numbers and scales that are powers of two keep sums exact."""
    x, norm, weight, _, top_k, first = whole_number_arguments(3, 256, 1400, 16)
    scales = np.exp2(np.random.default_rng(2).integers(-3, 3, (1, 1400))).astype(F32)
    expected = largest(x @ weight * scales, top_k)
    elements = weight.astype(INT8)
    halves = [
        ((x, norm, elements[:, half], 0.0, top_k, first + half.start, ReplicaGroup([[0, 1]]), 2), half)
        for half in (slice(0, 700), slice(700, 1400))
    ]
    launches = [(operands, {"w_head_scales": scales[:, half]}) for operands, half in halves]
    for cores in (1, 2):
        for _, values, ids in simulate.World("trn2", 2, cores).launch(kernels.lm_head, launches).outputs:
            assert np.array_equal(values, expected[0]) and np.array_equal(ids, expected[1])


def whole_number_arguments(
    rows: int, hidden: int, columns: int, top_k: int, first_id: int = 0
) -> tuple[Any, ...]:
    """Return rows of 1 and -1, whose root mean square is 1, and whole weights: sums are exact, and many are equal."""
    x, norm, _, _, *options = arguments(rows, hidden, columns, top_k, first_id=first_id)
    return np.sign(x), np.ones_like(norm), whole_numbers(3, hidden, columns), 0.0, *options


class TestLmHeadOnTwoCores(KernelTests):
    """Cores divide the columns."""

    case = KernelCase(
        kernels.lm_head,
        whole_number_arguments,
        two_cores=[
            dict(rows=1, hidden=16, columns=48, top_k=24),
            *slow(
                *together(
                    "rows hidden columns top_k",
                    *((1, 768, 1601, 8), (3, 40, 129, 24), (2, 24, 540, 264)),
                    first_id=128000,
                )
            ),
        ],
        refusals=[
            refuse(
                "each core has half of 47 columns: the largest 24 (top_k 24, rounded up",
                dict(rows=1, hidden=16, columns=48, top_k=24),
                cores=2,
                columns=47,
            )
        ],
        seeds=64,
    )


def test_a_cap_bends_logits_to_its_limit() -> None:
    inputs = TestLmHead.case.arguments(dict(rows=3, hidden=172, columns=1001, top_k=16) | bent(F32))
    assert 0.4 < np.abs(TestLmHead.case.run(inputs)[0]).max() <= 0.5


def check_ties(head: np.ndarray, hidden: int, top_k: int) -> None:
    """Check one row of ones and equal rows of a head of whole numbers: equal logits come lowest id first."""
    ones = np.ones((1, hidden), F32)
    inputs = ones, ones, head.repeat(hidden, axis=0), 0.0, top_k, np.int32([[0]])
    _, values, ids = run(kernels.lm_head, inputs)
    assert np.array_equal(values, largest(hidden * head, top_k)[0])
    assert np.array_equal(ids, largest(head, top_k)[1])


def tied(columns: int, distinct: int = 3) -> np.ndarray:
    """Return a head of one row whose logits are few whole numbers that occur many times."""
    return np.random.default_rng(4).integers(0, distinct, (1, columns)).astype(F32)


@pytest.mark.parametrize(
    ("columns", "hidden", "top_k"),
    [(1200, 768, 8), *((columns, 1, top_k) for columns in (100, 2048, 5001) for top_k in (8, 24, 64))],
)
def test_equal_logits_come_lowest_id_first(columns: int, hidden: int, top_k: int) -> None:
    check_ties(tied(columns), hidden, top_k)


def test_padding_stays_below_the_lowest_logits() -> None:
    """All logits are far below zero, where padding of zeros would win."""
    check_ties(-np.random.default_rng(6).uniform(1e30, 1e38, (1, 2050)).astype(F32), 1, 16)


def check_ranks(
    x: np.ndarray,
    norm: np.ndarray,
    head: np.ndarray,
    top_k: int,
    cuts: list[int],
    cores: int = 1,
    **options: float,
) -> np.ndarray:
    """Check that every rank of a launch gets the largest of all ranks; the columns of `head` are cut at `cuts`.

    Returns the logits of all ranks. Two cores have to agree in many schedules.
    """
    edges = [0, *cuts, head.shape[1]]
    group = ReplicaGroup([list(range(len(edges) - 1))])
    launches_of_ranks = [
        ((x, norm, head[:, a:b].copy(), 0.0, top_k, np.int32([[a]]), group, len(edges) - 1), options)
        for a, b in pairwise(edges)
    ]
    world, launches = simulate.World("trn1" if cores == 1 else "trn2", len(launches_of_ranks), cores), []
    seeds = 64 if cores > 1 else 0
    assert (
        find_faults(lambda: launches.append(world.launch(kernels.lm_head, launches_of_ranks)), seeds=seeds)
        == []
    )
    outputs = launches[0].outputs
    logits = np.concatenate([output[0] for output in outputs], axis=1)
    values, columns = largest(logits, -(-top_k // 8) * 8)
    for output in outputs:
        assert np.array_equal(output[1][:, : values.shape[1]], values)
        assert np.array_equal(output[2][:, : values.shape[1]], columns)
    return logits


@pytest.mark.parametrize(
    ("columns", "top_k", "cuts"),
    [
        *((100 * n, top_k, [100 * r for r in range(1, n)]) for n in (1, 2, 4) for top_k in (1, 24)),
        (97, 8, [50]),  # the last rank has a smaller part
    ],
)
def test_every_rank_gets_the_largest_of_all_ranks(columns: int, top_k: int, cuts: list[int]) -> None:
    check_ranks(*arguments(3, 24, columns)[:3], top_k, cuts)


@pytest.mark.slow
def test_two_cores_merge_over_ranks() -> None:
    x, norm, head, *_ = whole_number_arguments(3, 40, 260, 24)
    assert np.array_equal(check_ranks(x, norm, head, 24, [130], cores=2), x @ head)


ONE = np.ones((1, 1), F32)


@pytest.mark.parametrize("cuts", [[50], [30, 60, 90], [17000]])
def test_equal_logits_of_several_ranks_come_lowest_id_first(cuts: list[int]) -> None:
    check_ranks(ONE, ONE, tied(2 * cuts[-1] - 10), 24, cuts)


@pytest.mark.parametrize("options", [{}, {"softcap": 0.5}])
@pytest.mark.parametrize("cuts", [[1], [7, 8], [5, 10, 15, 20], list(range(1, 9))])
def test_parts_of_fewer_than_eight_columns_give_no_padding(
    cuts: list[int], options: dict[str, float]
) -> None:
    """All but one logit are as low as a cap makes any, and padding before them; equal ones come lowest id first."""
    head = np.full((1, cuts[-1] + 3), -1e6, F32)
    head[0, cuts[0]] = 1
    check_ranks(ONE, ONE, head, 8, cuts, **options)


def test_ranks_hold_together_as_many_columns_as_are_wanted() -> None:
    inputs = arguments(1, 16, 50)[:3]
    check_ranks(*inputs, 24, [33])
    with pytest.raises(
        AssertionError, match=r"no more than 16 columns: the largest 24 \(top_k 24, rounded up"
    ):
        check_ranks(*inputs, 24, [34])


@pytest.mark.slow
def test_takes_8192_candidates_of_all_ranks_and_refuses_more() -> None:
    def launch(ranks: int) -> None:
        inputs = (*arguments(128, 4, 2000, 1024), ReplicaGroup([list(range(ranks))]), ranks)
        world = simulate.World("trn1", ranks=ranks)
        world.launch(kernels.lm_head, [(inputs, {})] * ranks, mode=simulate.Mode.dry)

    launch(8)
    with pytest.raises(AssertionError, match="1024 of 9 ranks are more than 8192 candidates"):
        launch(9)

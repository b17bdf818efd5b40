"""router: which experts each token passes, and with which weight."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, check, copied, normal, run

BF16 = ml_dtypes.bfloat16


def arguments(
    tokens: int,
    hidden: int,
    experts: int,
    top_k: int,
    dtype: type = np.float32,
    weights: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    held = weights or dtype
    defaults = dict(
        renormalise=True,
        scoring="softmax",
        bias=None,
        choice_bias=None,
        groups=1,
        top_groups=1,
        scale=1.0,
        norm_offset=0.0,
    )
    return (
        normal(1, tokens, hidden, dtype=dtype),
        1 + normal(2, 1, hidden, dtype=held, scale=0.1),
        normal(3, hidden, experts, dtype=held, scale=hidden**-0.5),
        1e-5,
        top_k,
        *(defaults | options).values(),
    )


def checked(given: tuple[Any, ...], target: str = "trn2") -> tuple[np.ndarray, ...]:
    return check(kernels.router, kernels.router_reference, given, target)


SCORINGS: dict[str, dict[str, Any]] = {
    "softmax of all": dict(renormalise=False),
    "softmax of the chosen": dict(bias=normal(4, 1, 32)),
    "softmax behind a norm with an offset": dict(norm_offset=1.0),
    "softmax within groups": dict(renormalise=False, groups=4, top_groups=2, scale=16.0),
    "sigmoid": dict(scoring="sigmoid", renormalise=False, scale=2.5),
    "sigmoid with bias and groups": dict(
        scoring="sigmoid", choice_bias=normal(5, 1, 32, scale=0.1), groups=4, top_groups=2, scale=2.5
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_scorings_on_every_chip(target: str, scoring: str) -> None:
    checked(arguments(5, 72, 32, 6, **SCORINGS[scoring]), target)


@pytest.mark.parametrize(("dtype", "weights"), [(np.float32, BF16), (BF16, BF16), (BF16, np.float32)])
def test_dtypes(dtype: type, weights: type) -> None:
    checked(arguments(130, 172, 40, 4, dtype, weights))


@pytest.mark.parametrize("tokens", [128, 129, 257, 700])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_row_tiles_behind_one_another(tokens: int, dtype: type) -> None:
    """Up to six, in stages of which there are four."""
    checked(arguments(tokens, 72, 12, 3, dtype))


def test_rows_of_which_sbuf_does_not_hold_those_of_all_stages() -> None:
    """Four row tiles, the transposes of two and w_router take 128 KiB of a partition with 5404 elements."""
    for hidden in (5404, 5405):
        checked(arguments(257, hidden, 8, 2))


@pytest.mark.parametrize("size", [1, 127, 128, 129, 300])
def test_any_number_of_tokens_and_of_experts(size: int) -> None:
    checked(arguments(size, 24, 10, 3))
    checked(arguments(3, 24, size, 1))


@pytest.mark.parametrize("hidden", [64, 127, 128, 129])
def test_any_number_of_hidden_elements(hidden: int) -> None:
    checked(arguments(3, hidden, 12, 2))


@pytest.mark.parametrize("experts", [2, 7, 8, 9])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_every_expert_may_be_chosen(experts: int, scoring: str) -> None:
    _, weights, ids = checked(arguments(5, 24, experts, experts, scoring=scoring, renormalise=True))
    assert np.array_equal(np.sort(ids, axis=1), np.tile(np.arange(experts), (5, 1)))
    assert np.abs(weights.sum(axis=1) - 1).max() <= experts * np.finfo(np.float32).eps


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equal_scores_the_lower_number_comes_first(scoring: str) -> None:
    """Every logit is 0 but one; of choices beyond eight at a time too."""
    given = list(arguments(4, 24, 20, 11, scoring=scoring))
    given[2] = np.zeros((24, 20), np.float32)
    assert np.array_equal(run(kernels.router, given)[2], np.tile(np.arange(11), (4, 1)))
    given[7] = np.eye(1, 20, 13, dtype=np.float32)
    _, _, ids = checked(tuple(given))
    assert np.array_equal(ids, np.tile([13, *range(10)], (4, 1)))


def test_of_equal_groups_the_lower_number_comes_first() -> None:
    given = list(arguments(4, 24, 32, 9, scoring="sigmoid", groups=4, top_groups=2))
    given[2] = np.zeros((24, 32), np.float32)
    _, _, ids = checked(tuple(given))
    assert np.array_equal(ids, np.tile(np.arange(9), (4, 1)))


def test_a_choice_stays_within_the_best_groups_where_all_scores_are_below_zero() -> None:
    given = list(arguments(6, 24, 32, 16, scoring="sigmoid", groups=4, top_groups=2))
    given[8] = normal(9, 1, 32) - 9
    _, _, ids = checked(tuple(given))
    assert all(len({int(each) // 8 for each in row}) == 2 for row in ids)


@pytest.mark.parametrize("tokens", [5, 390])
def test_a_row_of_nan_gets_numbers_of_experts_and_harms_no_other_row(tokens: int) -> None:
    given = list(arguments(tokens, 128, 12, 3))
    clean = run(kernels.router, given, "trn2")
    given[0][2] = np.nan
    _, weights, ids = run(kernels.router, given, "trn2")
    assert np.isnan(weights[2]).all()
    assert 0 <= ids.min() <= ids.max() < 12
    rest = [row for row in range(tokens) if row != 2]
    assert np.array_equal(ids[rest], clean[2][rest])
    assert np.array_equal(weights[rest], clean[1][rest])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({2: normal(1, 25, 10)}, "w_router has 25 rows for a hidden size of 24"),
        ({1: normal(1, 1, 25)}, r"norm_weight is \[1, 24\], not \(1, 25\)"),
        ({4: 0}, "top_k is 1 to 10, the number of experts, not 0"),
        ({4: 11}, "top_k is 1 to 10, the number of experts, not 11"),
        ({6: "relu"}, "scoring is softmax or sigmoid, not relu"),
        ({7: normal(1, 1, 9)}, r"a bias of 10 experts is \[1, 10\], not \(1, 9\)"),
        ({8: normal(1, 1, 10)}, "choice_bias comes with sigmoid scoring"),
        ({6: "sigmoid", 9: 3}, "10 experts in 3 groups"),
        ({6: "sigmoid", 9: 2}, "groups of at least 8 experts, not of 5"),
        ({6: "sigmoid", 10: 2}, "top_groups is 1 to 1, not 2"),
    ],
)
def test_refuses_what_does_not_fit(changed: dict[int, Any], message: str) -> None:
    given = list(arguments(5, 24, 10, 3))
    run(kernels.router, given)
    for place, value in changed.items():
        given[place] = value
    with pytest.raises(AssertionError, match=message):
        run(kernels.router, given)


def test_groups_hold_as_many_experts_as_are_chosen() -> None:
    run(kernels.router, arguments(2, 24, 16, 8, scoring="sigmoid", groups=2))
    with pytest.raises(AssertionError, match="1 groups of 8 experts do not hold 9"):
        run(kernels.router, arguments(2, 24, 16, 9, scoring="sigmoid", groups=2))


def test_takes_its_largest_sizes_and_refuses_the_next() -> None:
    checked(arguments(2, 24, 511, 2))
    checked(arguments(2, 24, 512, 2))
    with pytest.raises(AssertionError, match="at most 512 experts, not 513"):
        run(kernels.router, arguments(2, 24, 513, 2))
    checked(arguments(2, 8191, 8, 2))
    checked(arguments(2, 8192, 8, 2))
    with pytest.raises(AssertionError, match="a hidden size of at most 8192, not 8193"):
        run(kernels.router, arguments(2, 8193, 8, 2))


@pytest.mark.parametrize("tokens", [3, 300])
def test_two_cores_give_what_one_gives(tokens: int) -> None:
    given = arguments(tokens, 72, 12, 2)
    one = run(kernels.router, given, "trn2")
    both = (
        simulate.World("trn2", logical_core_size=2).launch(kernels.router, [(copied(given), {})]).outputs[0]
    )
    for got, wanted in zip(both, one):
        assert np.array_equal(got, wanted)

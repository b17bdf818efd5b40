"""router: which experts each token passes, and with which weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import check, normal, run
from tests.kernels.case import (
    DTYPES,
    F32,
    GEN3_ON,
    MIXED_DTYPES,
    KernelCase,
    KernelTests,
    Undefined,
    limit,
    refuse,
    together,
    vary,
)


def arguments(
    tokens: int = 5,
    hidden: int = 24,
    experts: int = 10,
    top_k: int = 3,
    dtype: type = F32,
    weights: Any = None,
) -> list[Any]:
    weight_dtype = weights or dtype
    return [
        normal(1, tokens, hidden, dtype=dtype),
        1 + normal(2, 1, hidden, dtype=weight_dtype, scale=0.1),
        normal(3, hidden, experts, dtype=weight_dtype, scale=hidden**-0.5),
        1e-5,
        top_k,
    ]


GROUPS = dict(groups=4, top_groups=2)
SCORINGS = [
    dict(renormalise=False),
    dict(bias=normal(4, 1, 32)),
    dict(norm_offset=1.0),
    dict(renormalise=False, scale=16.0, **GROUPS),
    dict(scoring="sigmoid", renormalise=False, scale=2.5),
    dict(scoring="sigmoid", choice_bias=normal(5, 1, 32, scale=0.1), scale=2.5, **GROUPS),
]


class TestRouter(KernelTests):
    """Up to six row tiles pass four stages; with 5405 elements SBUF does not hold the rows of all stages."""

    case = KernelCase(
        kernels.router,
        arguments,
        values=[
            *(dict(hidden=72, experts=32, top_k=6, **scoring) for scoring in SCORINGS),
            *together("dtype weights", *MIXED_DTYPES, tokens=130, hidden=172, experts=40, top_k=4),
            *vary(tokens=[128, 129, 257, 700], hidden=72, experts=12, dtype=[*DTYPES]),
            *vary(tokens=257, hidden=[5404, 5405], experts=8, top_k=2),
            *vary(tokens=[1, 127, 128, 129, 300]),
            *vary(tokens=3, experts=[1, 127, 128, 129, 300], top_k=1),
            *vary(tokens=3, hidden=[64, 127, 128, 129], experts=12, top_k=2),
        ],
        refusals=[
            refuse("w_router has 25 rows for a hidden size of 24", w_router=normal(1, 25, 10)),
            refuse("norm_weight has to be [1, 24], not (1, 25)", norm_weight=normal(1, 1, 25)),
            refuse("top_k is 1 to 10, the number of experts, not 0", top_k=0),
            refuse("top_k is 1 to 10, the number of experts, not 11", dict(top_k=10), top_k=11),
            refuse("scoring is softmax or sigmoid, not relu", scoring="relu"),
            refuse("a bias of 10 experts is [1, 10], not (1, 9)", bias=normal(1, 1, 9)),
            refuse("choice_bias comes with sigmoid scoring", choice_bias=normal(1, 1, 10)),
            refuse("10 experts in 3 groups", scoring="sigmoid", groups=3),
            refuse("groups of at least 8 experts, not of 5", scoring="sigmoid", groups=2),
            refuse("top_groups is 1 to 1, not 2", scoring="sigmoid", top_groups=2),
            refuse(
                "1 groups of 8 experts do not hold 9",
                dict(experts=16, top_k=8, scoring="sigmoid", groups=2),
                top_k=9,
            ),
        ],
        limits=[
            limit("experts", 512, "at most 512 experts, not 513", tokens=2, top_k=2),
            limit("hidden", 8192, "a hidden size of at most 8192, not 8193", tokens=2, experts=8, top_k=2),
        ],
        undefined=[
            Undefined(dict(x=2), dict(tokens=tokens, hidden=128, experts=12), rows=[2], chips=GEN3_ON)
            for tokens in (5, 390)
        ],
        two_cores=vary(tokens=[3, 300], hidden=72, experts=12, top_k=2),
    )


def checked(**settings: Any) -> tuple[np.ndarray, ...]:
    inputs = tuple(TestRouter.case.arguments(settings).values())
    return check(kernels.router, kernels.router_reference, inputs, "trn2")


@pytest.mark.parametrize("experts", [2, 7, 8, 9])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_every_expert_may_be_chosen(experts: int, scoring: str) -> None:
    _, weights, ids = checked(experts=experts, top_k=experts, scoring=scoring)
    assert np.array_equal(np.sort(ids, axis=1), np.tile(np.arange(experts), (5, 1)))
    assert np.abs(weights.sum(axis=1) - 1).max() <= experts * np.finfo(F32).eps


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equal_scores_the_lower_number_comes_first(scoring: str) -> None:
    """Every logit is 0 but one; of choices beyond eight at a time too."""
    equal = dict(tokens=4, experts=20, top_k=11, scoring=scoring, w_router=np.zeros((24, 20), F32))
    assert np.array_equal(checked(**equal)[2], np.tile(np.arange(11), (4, 1)))
    ids = checked(**equal, bias=np.eye(1, 20, 13, dtype=F32))[2]
    assert np.array_equal(ids, np.tile([13, *range(10)], (4, 1)))


def test_of_equal_groups_the_lower_number_comes_first() -> None:
    zeros = np.zeros((24, 32), F32)
    ids = checked(tokens=4, experts=32, top_k=9, scoring="sigmoid", **GROUPS, w_router=zeros)[2]
    assert np.array_equal(ids, np.tile(np.arange(9), (4, 1)))


def test_a_choice_stays_within_the_best_groups_where_all_scores_are_below_zero() -> None:
    low = normal(9, 1, 32) - 9
    ids = checked(tokens=6, experts=32, top_k=16, scoring="sigmoid", **GROUPS, choice_bias=low)[2]
    assert all(len({int(expert) // 8 for expert in row}) == 2 for row in ids)


@pytest.mark.parametrize("tokens", [5, 390])
def test_a_row_of_nan_gets_numbers_of_experts(tokens: int) -> None:
    inputs = arguments(tokens, 128, 12)
    inputs[0][2] = np.nan
    ids = run(kernels.router, inputs, "trn2")[2]
    assert 0 <= ids.min() <= ids.max() < 12

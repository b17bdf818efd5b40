"""Ranks that hold whole experts: rows meet by experts_dispatch and experts_combine, whatever tokens choose."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import compare_all, copied, in_order, named, normal
from tests.kernels.case import BF16, F32, KernelCase, KernelTests, exactly, limit, refuse
from tests.kernels.test_experts import CHOICES, arguments

CHOICE = ("n", "weights", "ids")
"""What `choices_of` gives each rank, by the names of parameters."""


def launch(kernel: str, ranks: list[dict[str, Any]], cores: int = 1) -> list[Any]:
    world, function = simulate.World("trn2", len(ranks), logical_core_size=cores), getattr(kernels, kernel)
    return world.launch(function, [(copied(in_order(function, **own)), {}) for own in ranks]).outputs


def choices_of(ranks: int, tokens: int, experts: int, dtype: Any = F32) -> list[tuple[Any, ...]]:
    """Rows, weights and choices of each rank, three for a token."""
    rng = np.random.default_rng(tokens)
    return [
        (
            normal(rank, tokens, 24, dtype=dtype),
            rng.random((tokens, 3)).astype(F32),
            np.stack([rng.permutation(experts)[:3] for _ in range(tokens)]).astype(np.int32),
        )
        for rank in range(ranks)
    ]


def dispatched(given: list[tuple[Any, ...]], experts: int, cores: int = 1) -> list[Any]:
    """What every rank receives, which has to be exact."""
    count = len(given)
    group, each = ReplicaGroup([list(range(count))]), experts // count
    firsts = [np.array([[rank * each]], np.int32) for rank in range(count)]
    shared = dict(experts=each, replica_group=group, ranks=count)
    ranks = [dict(zip(CHOICE, own), first=first, **shared) for own, first in zip(given, firsts)]
    found = launch("experts_dispatch", ranks, cores)
    rows = {name: list(each) for name, each in zip(CHOICE, zip(*given))}
    wanted = kernels.experts_dispatch_reference(**rows, first=firsts, **shared)
    for own, other in zip(found, wanted, strict=True):
        for array, expected in zip(own, other, strict=True):
            assert array.dtype == expected.dtype and np.array_equal(array, expected)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 129])
def test_every_rank_gets_the_rows_of_all_and_its_own_choices(ranks: int, tokens: int) -> None:
    found = dispatched(choices_of(ranks, tokens, 8), 8)
    chosen = sum(int((ids < 8 // ranks).sum()) for _, _, ids in found)
    assert chosen == ranks * tokens * 3  # each choice is computed by one rank


def test_rows_of_bfloat16_and_two_cores() -> None:
    given = choices_of(2, 5, 6, BF16)
    first = dispatched(given, 6)
    for one, both in zip(first, dispatched(given, 6, cores=2), strict=True):
        assert all(map(np.array_equal, one, both))


@pytest.mark.parametrize(("cores", "dtype"), [(1, F32), (2, BF16)])
def test_ranks_that_cut_rows_get_all_of_them_with_their_choices(cores: int, dtype: Any) -> None:
    """The number of an expert that is elsewhere, 8, stays too."""
    given = choices_of(2, 33, 8, dtype)
    given[1][2][:5] = 8
    group = ReplicaGroup([[0, 1]])
    ranks = [dict(zip(CHOICE, each), first=None, experts=8, replica_group=group, ranks=2) for each in given]
    for own in launch("experts_dispatch", ranks, cores):
        for found, parts in zip(own, zip(*given), strict=True):
            assert found.dtype == parts[0].dtype and np.array_equal(found, np.concatenate(parts))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("tokens", "residual", "absent"), [(3, True, False), (129, False, True)])
def test_biases_are_added_once_to_the_sum_over_ranks(
    tokens: int, residual: bool, absent: bool, dtype: Any
) -> None:
    """Where experts are `absent`, choices of number 8 have weight 0 and no bias."""
    results = [normal(rank, 2 * tokens, 40, dtype=dtype) for rank in range(2)]
    x = [normal(9 + rank, tokens, 40, dtype=dtype) if residual else None for rank in range(2)]
    choices, b_down = choices_of(2, tokens, 8), normal(7, 8, 40, dtype=dtype)
    for _, weights, ids in choices if absent else ():
        ids[::2, 1], weights[::2, 1] = 8, 0.0
    group = ReplicaGroup([[0, 1]])
    shared = dict(ranks=2, b_down=b_down, absent=absent)
    names = ("results", "residual", "weights", "ids")
    every = [dict(zip(names, own)) for own in zip(results, x, *zip(*(each[1:] for each in choices)))]
    found = launch("experts_combine", [own | shared | {"replica_group": group} for own in every])
    for place, own in enumerate(found):
        parts = tuple(each[place * tokens : (place + 1) * tokens] for each in results)
        weights, ids = choices[place][1:]
        held = np.concatenate([b_down, np.zeros((1, 40), dtype)])
        terms = [weights[:, k : k + 1] * held[ids[:, k]].astype(F32) for k in range(3)]
        before = [] if x[place] is None else [x[place]]
        wanted = np.sum([each.astype(np.float64) for each in (*before, *parts, *terms)], axis=0)
        scale = np.abs([each.astype(np.float64) for each in (*parts, *terms, *before)]).sum(axis=0)
        # Six or seven sums in float32, and one rounding to the dtype.
        allowed = 8 * np.finfo(F32).eps * scale + ml_dtypes.finfo(dtype).eps * np.abs(wanted)
        assert own.dtype == dtype and (np.abs(own.astype(np.float64) - wanted) <= allowed).all()
        whole = {name: [own[name] for own in every] for name in names}
        reference = kernels.experts_combine_reference(**whole, replica_group=None, **shared)[place]
        assert (np.abs(reference.astype(np.float64) - wanted) <= allowed).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 127), (2, 128), (4, 129), (4, 1)])
def test_the_results_of_all_ranks_are_added(ranks: int, tokens: int, dtype: Any) -> None:
    results = [normal(rank, ranks * tokens, 40, dtype=dtype) for rank in range(ranks)]
    x = [normal(9 + rank, tokens, 40, dtype=dtype) for rank in range(ranks)]
    group = ReplicaGroup([list(range(ranks))])
    shared = dict(replica_group=group, ranks=ranks)
    found = launch(
        "experts_combine", [dict(results=own, residual=rows, **shared) for own, rows in zip(results, x)]
    )
    for place, own in enumerate(found):
        parts = [each[place * tokens : (place + 1) * tokens] for each in results]
        compare_all((own,), summed, (x[place], *parts))


def summed(x: np.ndarray, *parts: np.ndarray) -> np.ndarray:
    """The reference's result of one rank."""
    places = ([part] * len(parts) for part in parts)
    results = [np.concatenate(part) for part in places]
    return kernels.experts_combine_reference(
        results=results, residual=[x] * len(parts), replica_group=None, ranks=len(parts)
    )[0]


def whole_chain(given: dict[str, Any], kernel: str, ranks: int) -> list[np.ndarray]:
    """The tokens of all ranks, each of which has as many of them and of the experts."""
    x, experts = given["residual"], len(given["w_up"])
    tokens, each = len(x) // ranks, experts // ranks
    parts = [slice(rank * tokens, (rank + 1) * tokens) for rank in range(ranks)]
    received = dispatched([tuple(given[name][own] for name in CHOICE) for own in parts], experts)
    own_experts = [slice(rank * each, (rank + 1) * each) for rank in range(ranks)]
    stacks = [name for name in given if name[:2] in ("w_", "b_") and given[name] is not None]
    computed = launch(
        kernel,
        [
            given
            | {"residual": None, "absent": True}
            | dict(zip(CHOICE, own))
            | {name: given[name][held] for name in stacks}
            for own, held in zip(received, own_experts)
        ],
    )
    shared = dict(replica_group=ReplicaGroup([list(range(ranks))]), ranks=ranks)
    combined = [dict(results=results, residual=x[own], **shared) for results, own in zip(computed, parts)]
    return launch("experts_combine", combined)


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 4), (4, 4), (4, 128), (2, 260)])
def test_any_distribution_of_choices(choices: str, ranks: int, tokens: int) -> None:
    """All tokens of all ranks to one expert, none to most of them: in a prompt the weights of those are not numbers."""
    ids = CHOICES[choices](tokens, 8)
    drawn = arguments(tokens, 24, 8, 10, ids.shape[1], ids=ids)
    given, poisoned = (named(kernels.experts_decode, each) for each in (drawn, copied(drawn)))
    for name in ("w_gate", "w_up", "w_down"):
        poisoned[name][np.setdiff1d(np.arange(8), ids)] = np.nan
    for kernel in ("experts_decode", "experts_prefill") if tokens <= 128 else ("experts_prefill",):
        found = whole_chain(poisoned if kernel == "experts_prefill" else given, kernel, ranks)
        compare_all((np.concatenate(found),), kernels.experts_decode_reference, drawn)


@pytest.mark.parametrize("kernel", ["experts_decode", "experts_prefill"])
@pytest.mark.parametrize(("tokens", "dtype"), [(2, F32), (40, F32)])
def test_biases_belong_to_the_rank_of_their_expert(kernel: str, tokens: int, dtype: Any) -> None:
    given = arguments(tokens, 72, 8, 40, 2, dtype, biases=True, activation="swigluoai")
    found = whole_chain(named(kernels.experts_decode, given), kernel, 2)
    compare_all((np.concatenate(found),), kernels.experts_decode_reference, given)


def test_more_choices_than_a_rank_has_experts() -> None:
    """Every token chooses six of eight experts, of which a rank has two."""
    given = arguments(40, 24, 8, 10, 6)
    for kernel in ("experts_decode", "experts_prefill"):
        rows = np.concatenate(whole_chain(named(kernels.experts_decode, given), kernel, 4))
        compare_all((rows,), kernels.experts_decode_reference, given)


ONE = ReplicaGroup([[0]])


def dispatch(tokens: int = 5, experts: int = 8) -> tuple[Any, ...]:
    """The arguments of one rank."""
    own = dict(zip(CHOICE, choices_of(1, tokens, experts)[0]), first=np.zeros((1, 1), np.int32))
    return in_order(kernels.experts_dispatch, **own, experts=experts, replica_group=ONE, ranks=1)


class TestRefusalsOfExpertsDispatch(KernelTests):
    case = KernelCase(
        kernels.experts_dispatch,
        dispatch,
        refusals=[
            refuse("ids of 4 tokens, n has 5", ids=lambda ids: ids[:4]),
            refuse("weights are (5, 2), ids are (5, 3)", weights=lambda weights: weights[:, :2]),
            refuse("first is [1, 1], not (1, 2)", first=np.zeros((1, 2), np.int32)),
            refuse("experts is 0; every rank has one", experts=lambda _: 0),
        ],
    )


def combine(tokens: int = 5, hidden: int = 24, dtype: Any = F32, biases: bool = False) -> tuple[Any, ...]:
    """The arguments of one rank, whose own rows are its results."""
    rows = normal(1, tokens, hidden, dtype=dtype)
    beside: dict[str, Any] = {}
    if biases:
        _, weights, ids = choices_of(1, tokens, 8)[0]
        beside = dict(weights=weights, ids=ids, b_down=normal(2, 8, hidden))
    own = dict(results=rows, residual=rows.copy(), replica_group=ONE, ranks=1)
    return in_order(kernels.experts_combine, **own, **beside)


def doubled(results: np.ndarray, *_: Any) -> np.ndarray:
    return (2 * results.astype(F32)).astype(results.dtype)


class TestLimitsOfExpertsCombine(KernelTests):
    case = KernelCase(
        kernels.experts_combine,
        combine,
        refusals=[
            refuse("results are [5, 24] float32, not (4, 24) float32", results=lambda rows: rows[:4]),
            refuse(
                "results are [5, 24] float32, not (5, 24) bfloat16", results=lambda rows: rows.astype(BF16)
            ),
            refuse("ids of 4 tokens, results are of 5", dict(biases=True), ids=lambda ids: ids[:4]),
            refuse(
                "weights are (5, 2), ids are (5, 3)",
                dict(biases=True),
                weights=lambda weights: weights[:, :2],
            ),
            refuse("b_down is [E, 24], not (8, 23)", dict(biases=True), b_down=lambda bias: bias[:, :23]),
        ],
        limits=[
            limit("hidden", most, f"a hidden size of at most {most}, not {most + 1}", tokens=2, dtype=dtype)
            for dtype, most in ((F32, 4096), (BF16, 8192))
        ],
        tolerance=exactly,
        reference=doubled,
    )

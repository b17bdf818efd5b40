"""Ranks that hold whole experts: rows meet by experts_dispatch and experts_combine, whatever tokens choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import as_tuple, compare_all, copied, in_float64, in_order, named, normal
from tests.kernels.case import BF16, DTYPES, F32, KernelCase, KernelTests, Ranks, exactly, limit, refuse
from tests.kernels.test_experts import CHOICES, arguments

CHOICE = ("n", "weights", "ids")
"""What `choices_of` gives each rank, by the names of parameters."""


def launch(kernel: str, ranks: list[dict[str, Any]]) -> list[Any]:
    world, function = simulate.World("trn2", len(ranks)), getattr(kernels, kernel)
    return world.launch(function, [(copied(in_order(function, **rank)), {}) for rank in ranks]).outputs


def joined(kernel: str, *names: str) -> Callable[..., tuple[np.ndarray, ...]]:
    """Return a reference of the arguments of all ranks, of which those with some names are below each other."""
    reference = getattr(kernels, f"{kernel}_reference")

    def join_ranks(*arguments: Any) -> tuple[np.ndarray, ...]:
        inputs = named(reference, arguments)
        slices = {name: np.split(inputs[name], inputs["ranks"]) for name in names if inputs[name] is not None}
        return tuple(map(np.concatenate, zip(*map(as_tuple, reference(**inputs | slices)))))

    return join_ranks


def choices_of(ranks: int, tokens: int, experts: int, dtype: Any = F32) -> list[np.ndarray]:
    """Return rows, weights and choices of all ranks, three for a token."""
    rng = np.random.default_rng(tokens)
    return [
        np.concatenate([normal(rank, tokens, 24, dtype=dtype) for rank in range(ranks)]),
        rng.random((ranks * tokens, 3)).astype(F32),
        np.stack([rng.permutation(experts)[:3] for _ in range(ranks * tokens)]).astype(np.int32),
    ]


def dispatch(ranks: int = 1, tokens: int = 5, experts: int = 8, dtype: Any = F32) -> tuple[Any, ...]:
    """Return the arguments of all ranks, each of which has as many experts."""
    firsts = np.arange(0, experts, experts // ranks, dtype=np.int32)[:, None]
    inputs = dict(zip(CHOICE, choices_of(ranks, tokens, experts, dtype)), first=firsts)
    return in_order(
        kernels.experts_dispatch,
        **inputs,
        experts=experts // ranks,
        replica_group=ReplicaGroup([[0]]),
        ranks=ranks,
    )


def over(count: int, names: str, seeds: int = 0, **settings: Any) -> Ranks:
    """Return ranks that cut the arguments of some names."""
    return Ranks(
        count, dict.fromkeys(names.split(), 0), dict(settings, ranks=count), joined=True, seeds=seeds
    )


class TestExpertsDispatch(KernelTests):
    """Every rank gets the rows of all and its own choices, or all choices, also those of an expert elsewhere, 8."""

    case = KernelCase(
        kernels.experts_dispatch,
        dispatch,
        refusals=[
            refuse("ids are of 4 tokens, n of 5; both have to be equal", ids=lambda ids: ids[:4]),
            refuse("weights are (5, 2), ids are (5, 3)", weights=lambda weights: weights[:, :2]),
            refuse("first has to be [1, 1], not (1, 2)", first=np.zeros((1, 2), np.int32)),
            refuse("experts is 0; every rank has at least one", experts=lambda _: 0),
        ],
        ranks=[
            *(
                over(count, "n weights ids first", tokens=tokens)
                for count in (2, 4)
                for tokens in (1, 31, 32, 33, 129)
            ),
            *(over(2, "n weights ids first", seeds, tokens=5, experts=6, dtype=BF16) for seeds in (0, 2)),
            *(
                over(
                    *(2, "n weights ids", seeds),
                    tokens=33,
                    dtype=dtype,
                    first=lambda _: None,
                    ids=lambda ids: np.where(np.arange(66)[:, None] // 5 == 7, np.int32(8), ids),
                )
                for seeds, dtype in ((0, F32), (2, BF16))
            ),
        ],
        tolerance=exactly,
        reference=joined("experts_dispatch", *CHOICE, "first"),
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_choice_is_computed_by_one_rank(ranks: int) -> None:
    case = TestExpertsDispatch.case
    ids = joined("experts_dispatch", *CHOICE, "first")(*case.arguments(dict(ranks=ranks)).values())[2]
    assert (ids < 8 // ranks).sum() == ranks * 5 * 3


def combine(
    ranks: int = 1,
    tokens: int = 5,
    hidden: int = 24,
    dtype: Any = F32,
    residual: bool = True,
    biases: bool = False,
    absent: bool = False,
) -> tuple[Any, ...]:
    """Return the arguments of all ranks; where experts are `absent`, choices of number 8 have weight 0 and no bias."""
    _, weights, ids = choices_of(ranks, tokens, 8)
    if absent:
        ids[::2, 1], weights[::2, 1] = 8, 0.0
    return in_order(
        kernels.experts_combine,
        results=np.concatenate([normal(rank, ranks * tokens, hidden, dtype=dtype) for rank in range(ranks)]),
        residual=normal(9, ranks * tokens, hidden, dtype=dtype) if residual else None,
        replica_group=ReplicaGroup([[0]]),
        ranks=ranks,
        absent=absent,
        **(dict(weights=weights, ids=ids, b_down=normal(7, 8, hidden, dtype=dtype)) if biases else {}),
    )


COMBINED = joined("experts_combine", "results", "residual", "weights", "ids")


class TestExpertsCombine(KernelTests):
    """Biases are added once to the sum over ranks."""

    case = KernelCase(
        kernels.experts_combine,
        combine,
        refusals=[
            refuse(
                "results have to be [5, 24] float32 for residual (5, 24) and 1 ranks, not (4, 24) float32",
                results=lambda rows: rows[:4],
            ),
            refuse(
                "results have to be [5, 24] float32 for residual (5, 24) and 1 ranks, not (5, 24) bfloat16",
                results=lambda rows: rows.astype(BF16),
            ),
            refuse(
                "ids are of 4 tokens, results of 5; both have to be equal",
                dict(biases=True),
                ids=lambda ids: ids[:4],
            ),
            refuse(
                "weights are (5, 2), ids are (5, 3)",
                dict(biases=True),
                weights=lambda weights: weights[:, :2],
            ),
            refuse(
                "b_down has to be [E, 24], not (8, 23)", dict(biases=True), b_down=lambda bias: bias[:, :23]
            ),
        ],
        limits=[
            limit("hidden", most, f"a hidden size of at most {most}, not {most + 1}", tokens=2, dtype=dtype)
            for dtype, most in ((F32, 4096), (BF16, 8192))
        ],
        ranks=[
            ranks
            for dtype in DTYPES
            for ranks in (
                *(
                    over(count, "results residual", tokens=tokens, hidden=40, dtype=dtype)
                    for count, tokens in ((2, 127), (2, 128), (4, 129), (4, 1))
                ),
                over(2, "results residual weights ids", tokens=3, hidden=40, dtype=dtype, biases=True),
                over(
                    *(2, "results weights ids"),
                    tokens=129,
                    hidden=40,
                    dtype=dtype,
                    biases=True,
                    residual=False,
                    absent=True,
                ),
            )
        ],
        reference=COMBINED,
    )


@pytest.mark.parametrize("absent", [False, True])
def test_the_reference_adds_the_biases_of_choices_once(absent: bool) -> None:
    inputs = TestExpertsCombine.case.arguments(dict(ranks=2, biases=True, absent=absent))
    both = [inputs, inputs | {"b_down": None}]
    total, without = (COMBINED(*map(in_float64, inputs.values()))[0] for inputs in both)
    biases = np.concatenate([inputs["b_down"], np.zeros((1, 24))])[inputs["ids"]]
    assert np.allclose(
        total - without, (inputs["weights"][:, :, None] * biases).sum(axis=1), rtol=1e-12, atol=1e-12
    )


def whole_chain(inputs: dict[str, Any], kernel: str, ranks: int) -> tuple[np.ndarray]:
    """Return the tokens of all ranks, each of which has as many of them and of the experts."""
    stacks = [name for name in inputs if name[:2] in ("w_", "b_") and inputs[name] is not None]
    slices = {name: np.split(inputs[name], ranks) for name in (*CHOICE, "residual", *stacks)}
    shares = [{name: rank_slices[rank] for name, rank_slices in slices.items()} for rank in range(ranks)]
    shared, experts_per_rank = (
        dict(replica_group=ReplicaGroup([list(range(ranks))]), ranks=ranks),
        len(shares[0]["w_up"]),
    )
    received = launch(
        "experts_dispatch",
        [
            {name: share[name] for name in CHOICE}
            | shared
            | dict(experts=experts_per_rank, first=np.int32([[rank * experts_per_rank]]))
            for rank, share in enumerate(shares)
        ],
    )
    computed = launch(
        kernel,
        [
            inputs | share | dict(zip(CHOICE, choices), residual=None, absent=True)
            for choices, share in zip(received, shares)
        ],
    )
    combined = [
        dict(results=results, residual=share["residual"], **shared)
        for results, share in zip(computed, shares)
    ]
    return (np.concatenate(launch("experts_combine", combined)),)


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 4), (4, 4), (4, 128), (2, 260)])
def test_any_distribution_of_choices(choices: str, ranks: int, tokens: int) -> None:
    """All tokens of all ranks to one expert, none to most of them: in a prompt the weights of those are not numbers."""
    ids = CHOICES[choices](tokens, 8)
    drawn = arguments(tokens, 24, 8, 10, ids.shape[1], ids=ids)
    named_inputs, poisoned = (named(kernels.experts_decode, inputs) for inputs in (drawn, copied(drawn)))
    for name in ("w_gate", "w_up", "w_down"):
        poisoned[name][np.setdiff1d(np.arange(8), ids)] = np.nan
    compare_all(whole_chain(poisoned, "experts_prefill", ranks), kernels.experts_decode_reference, drawn)
    if tokens <= 128:
        compare_all(
            whole_chain(named_inputs, "experts_decode", ranks), kernels.experts_decode_reference, drawn
        )


@pytest.mark.parametrize("kernel", ["experts_decode", "experts_prefill"])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        *(
            (2, dict(tokens=tokens, hidden=72, experts=8, inner=40, biases=True, activation="swigluoai"))
            for tokens in (2, 40)
        ),
        (4, dict(tokens=40, experts=8, top_k=6)),
    ],
)
def test_biases_of_their_experts_and_more_choices_than_a_rank_has_experts(
    kernel: str, ranks: int, settings: dict[str, Any]
) -> None:
    inputs = arguments(**settings)
    outputs = whole_chain(named(kernels.experts_decode, inputs), kernel, ranks)
    compare_all(outputs, kernels.experts_decode_reference, inputs)

"""sample: the token that an oracle in float64 draws, wherever the uniform number is not too near to an edge."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from model.engine.draw import draw as draw_on_host
from model.sampling import RowSampling
from tests.kernels.accuracy import TARGETS, check, compare, find_faults, in_float64, normal, run
from tests.kernels.case import BF16, F32, KernelCase, KernelTests, limit, refuse, slow

EPSILON = 2.0**-24
"""Half the distance of neighbouring float32 around 1: the relative error of one rounding."""


def column(values: Any, rows: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(values, F32).reshape(-1, 1), (rows, 1)).copy()


def arguments(
    logits: np.ndarray,
    uniform: Any,
    temperature: Any = 1.0,
    top_k: Any = 1024,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    candidates: int = 8,
) -> tuple[Any, ...]:
    rows = len(logits)
    return (
        logits,
        *(column(limit, rows) for limit in (uniform, temperature, top_k, top_p, min_p)),
        candidates,
    )


@dataclass
class Draw:
    """What an oracle draws, and how near any of its decisions was, as a share of all weights."""

    token: int
    margin: float


def draw(logits: np.ndarray, limits: tuple[float, ...], keep: int) -> Draw:
    """Draw from one row in float64, by sorting pairs: no sum or search is shared with the kernel or its reference."""
    uniform, temperature, top_k, top_p, min_p = limits
    best = sorted((-float(value), token) for token, value in enumerate(logits) if value > -1e30)[:keep]
    if temperature == 0:
        return Draw(best[0][1], 1.0)
    weights = [(np.exp((best[0][0] - value) / temperature), token) for value, token in best[: int(top_k)]]
    sum_of_weights, ahead, kept, margin = sum(weight for weight, _ in weights), 0.0, [], 1.0
    for weight, token in weights:
        if top_p < 1 and ahead:
            margin = min(margin, abs(ahead / sum_of_weights - top_p))
        if min_p:
            margin = min(margin, abs(weight - min_p) if weight < 1 else 1.0)
        if (top_p >= 1 or ahead < top_p * sum_of_weights) and weight >= min_p:
            kept.append((token, weight))
        ahead += weight
    total, below, token_id = sum(weight for _, weight in kept), 0.0, -1
    for token, weight in sorted(kept):
        below += weight / total
        margin = min(margin, abs(below - uniform)) if token_id >= 0 or below < 1 - 1e-9 else margin
        if token_id < 0 and below > uniform:
            token_id = token
    return Draw(token_id if token_id >= 0 else sorted(kept)[-1][0], margin)


def tolerance(inputs: tuple[Any, ...]) -> float:
    """Return how far rounding moves a cumulative sum, as a share of it.

    An exponent has at most 200 in size where its weight counts and three roundings; exp adds two units in the last
    place, each of K sums one rounding, the product with the uniform number one.
    """
    temperature = inputs[2][inputs[2] > 0].min(initial=1.0)
    finite = inputs[0][np.isfinite(inputs[0].astype(F32))].astype(np.float64)
    exponent = min(90.0, float(np.ptp(finite)) / temperature) if len(finite) else 0.0
    return EPSILON * (3 * exponent + 4 + 2 * inputs[6] + 1)


def check_draws(inputs: tuple[Any, ...], target: str = "trn2") -> int:
    """Compare every row that is away from an edge; how many there were."""
    chosen, log_probs, top_ids, top_log_probs = run(kernels.sample, inputs, target)
    logits, rows, keep = in_float64(inputs[0]), len(inputs[0]), -(-inputs[6] // 8) * 8
    assert chosen.dtype == top_ids.dtype == np.int32 and chosen.shape == log_probs.shape == (rows, 1)
    order = np.argsort(-np.where(np.isnan(logits), -np.inf, logits), axis=1, kind="stable")[:, :keep]
    assert np.array_equal(top_ids, order)
    compared = 0
    for row in range(rows):
        limits = tuple(float(limit[row, 0]) for limit in inputs[1:6])
        expected = draw(logits[row], limits, keep)
        if expected.margin > tolerance(inputs):
            assert chosen[row, 0] == expected.token, (row, limits, expected)
            compared += 1
        index = top_ids[row].tolist().index(chosen[row, 0])
        assert log_probs[row, 0] == top_log_probs[row, index]
    return compared


def mixed(rows: int, columns: int, dtype: Any = F32, candidates: int = 16) -> tuple[Any, ...]:
    """Return rows with parameters of every kind beside each other."""
    random = np.random.default_rng(rows * columns)
    return arguments(
        normal(columns, rows, columns, dtype=dtype, scale=3.0),
        random.random(rows),
        random.choice([0.0, 0.3, 1.0, 2.5], rows),
        random.choice([1, 3, 16, 1000], rows),
        random.choice([0.3, 0.9, 1.0], rows),
        random.choice([0.0, 0.05, 1.0], rows),
        candidates,
    )


@pytest.mark.parametrize(
    ("target", "rows", "columns", "dtype", "candidates"),
    [
        ("trn1", 40, 300, F32, 16),
        ("trn2", 40, 300, BF16, 16),
        *(("trn3", 20, 200, F32, candidates) for candidates in (1, 8, 9, 64, 200)),
        *(
            pytest.param(TARGETS[rows % 3], rows, columns, F32, 16, marks=pytest.mark.slow)
            for rows, columns in (
                *((1, 16), (127, 129), (128, 127), (2, 4100), (3, 513)),
                *((5, 40000), (64, 9000)),
            )
        ),
    ],
)
def test_draws_like_the_oracle(target: str, rows: int, columns: int, dtype: type, candidates: int) -> None:
    assert check_draws(mixed(rows, columns, dtype, candidates), target) > 0.6 * rows


@pytest.mark.parametrize(("rows", "columns", "candidates"), [(3, 1000, 64), (128, 5000, 16), (2, 70000, 24)])
def test_equal_logits_come_lowest_id_first(rows: int, columns: int, candidates: int) -> None:
    """Few whole numbers, each many times; long chunks are searched in groups."""
    logits = np.random.default_rng(4).integers(0, 5, (rows, columns)).astype(F32)
    chosen, _, top_ids, _ = run(kernels.sample, arguments(logits, 0.5, 0.0, candidates=candidates))
    order = np.argsort(-logits, axis=1, kind="stable")
    assert np.array_equal(top_ids, order[:, :candidates])
    assert np.array_equal(chosen, order[:, :1])


def test_log_probabilities_are_as_near_as_those_of_numpy() -> None:
    inputs = mixed(7, 3000)
    outputs = check(kernels.sample, kernels.sample_reference, inputs, "trn1")
    exact = in_float64(inputs[0])
    exact = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    truth = np.take_along_axis(exact, outputs[2], axis=1)
    compare(outputs[3], truth, truth.astype(F32))


def test_the_same_as_the_sampler_of_the_host() -> None:
    """The host's numbers are rounded to float32, which moves a draw by less than the tolerance."""
    logits = normal(9, 1, 64, scale=2.0)[0]
    rows, compared = 128, 0
    for options in (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 12},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.7},
        {"temperature": 1.0},
    ):
        seeds = range(rows)
        numbers = [np.random.Generator(np.random.Philox(seed)).random() for seed in seeds]
        limits = options["temperature"], options.get("top_k", 1024), options.get("top_p", 1.0)
        inputs = arguments(np.tile(logits, (rows, 1)), numbers, *limits, candidates=64)
        chosen = run(kernels.sample, inputs)[0][:, 0]
        for seed in seeds:
            if draw(logits, (numbers[seed], *limits, 0.0), 64).margin > tolerance(inputs) + EPSILON:
                row = RowSampling(numbers[seed], **options)
                assert [chosen[seed]] == draw_on_host(logits[None], [row])
                compared += 1
    assert compared > 480


def test_draws_follow_the_probabilities() -> None:
    """Pearson's statistic of 2,560 draws of eight tokens, of which 24.3 is passed once in a thousand seeds."""
    logits, rows = normal(12, 1, 40, scale=1.5), 128
    random, counts = np.random.default_rng(13), np.zeros(40)
    for _ in range(20):
        inputs = arguments(np.tile(logits, (rows, 1)), random.random(rows), 1.4)
        counts += np.bincount(run(kernels.sample, inputs)[0][:, 0], minlength=40)
    kept = np.argsort(-logits[0])[:8]
    weights = np.exp(logits[0, kept].astype(np.float64) / 1.4)
    expected = counts.sum() * weights / weights.sum()
    assert counts[kept].sum() == 20 * rows
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 24.3


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, 1.0])
def test_masked_tokens_are_never_chosen(uniform: float) -> None:
    logits = normal(14, 4, 700)
    logits[0, 5:] = -np.inf
    logits[1, :699] = -np.inf  # all but the last
    logits[2, 3:] = np.nan  # padding
    logits[3, ::2] = -1e4
    logits[3, 1::2] = np.nan
    inputs = arguments(logits, uniform, [1.0, 1.0, 50.0, 1.0], candidates=16)
    chosen, log_probs, _, top_log_probs = run(kernels.sample, inputs)
    assert chosen[0, 0] < 5 and chosen[1, 0] == 699 and chosen[2, 0] < 3 and chosen[3, 0] % 2 == 0
    assert np.isfinite(log_probs).all() and log_probs[1, 0] == 0
    assert np.array_equal(np.isfinite(top_log_probs).sum(axis=1), [5, 1, 3, 16])


def test_large_and_equal_logits() -> None:
    """A best logit of ±10,000 beside others 1 lower, and rows of one value."""
    logits = np.concatenate([normal(15, 2, 300) * 1e4, np.full((2, 300), -1e4), np.zeros((2, 300))]).astype(
        F32
    )
    logits[2:4, 7] += 1
    inputs = arguments(
        logits, [0.1, 0.9, 0.2, 0.9, 0.26, 0.74], [1.0, 0.0, 1.0, 0.5, 1.0, 1e-3], candidates=8
    )
    assert check_draws(inputs) == 6
    assert np.isfinite(run(kernels.sample, inputs)[1]).all()


def test_the_number_one_draws_the_last_token() -> None:
    """Rounded to float32, a number below 1 can be 1."""
    inputs = arguments(normal(16, 1, 64), 1.0, candidates=8)
    assert run(kernels.sample, inputs)[0][0, 0] == np.argsort(-inputs[0][0])[:8].max()


def penalties(rows: int, columns: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(17)
    return {
        "bias": random.choice([0, 0, 0, 1.5, -np.inf], (rows, columns)).astype(F32),
        "prompt_counts": (random.random((rows, columns)) < 0.2).astype(BF16),
        "output_counts": random.choice([0, 0, 1, 3], (rows, columns)).astype(F32),
        "repetition": column(random.choice([0.8, 1.0, 1.3], rows), rows),
        "presence": column(random.choice([0.0, 0.5, -0.5], rows), rows),
        "frequency": column(random.choice([0.0, 0.2], rows), rows),
    }


def adjusted(logits: np.ndarray, options: dict[str, np.ndarray]) -> np.ndarray:
    """Adjust logits token by token in float64, as vLLM describes its parameters."""
    result = np.array(logits, np.float64)
    for (row, token), value in np.ndenumerate(result):
        value += options["bias"][row, token] if "bias" in options else 0
        times = options["output_counts"][row, token]
        if times > 0 or ("prompt_counts" in options and options["prompt_counts"][row, token] > 0):
            factor = float(options["repetition"][row, 0])
            value = value / factor if value > 0 else value * factor
        value -= options["presence"][row, 0] * (times > 0) + options["frequency"][row, 0] * times
        result[row, token] = value
    return result


@pytest.mark.parametrize(
    ("target", "left_out"), [("trn1", ()), ("trn2", ("bias",)), ("trn3", ("prompt_counts",))]
)
def test_bias_and_penalties(target: str, left_out: tuple[str, ...]) -> None:
    inputs = mixed(6, 1100)
    options = {name: option for name, option in penalties(6, 1100).items() if name not in left_out}
    outputs = simulate.World(target).launch(kernels.sample, [(inputs, options)]).outputs[0]
    exact = adjusted(inputs[0], options)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :16]
    assert np.array_equal(outputs[2], order)
    truth = np.take_along_axis(exact - np.log(np.exp(exact).sum(axis=1, keepdims=True)), order, axis=1)
    plain = kernels.sample_reference(*inputs, **options)
    compare(outputs[3], truth, plain[3])
    assert np.array_equal(outputs[0], plain[0])


def test_a_step_from_the_candidates_of_lm_head() -> None:
    x, head = normal(20, 5, 64), normal(21, 64, 900)
    logits, values, ids = run(kernels.lm_head, (x, np.ones((1, 64), F32), head, 1e-5, 16, np.int32([[100]])))
    numbers = np.random.default_rng(22).random(5)
    inputs = (*arguments(logits, numbers, 0.7, candidates=16), None)
    from_all = (
        simulate.World("trn2")
        .launch(kernels.sample, [(inputs, {"vocab_offset": np.int32([[100]])})])
        .outputs[0]
    )
    for candidate_inputs in ((*arguments(values, numbers, 0.7, candidates=16), ids),):
        from_candidates = run(kernels.sample, candidate_inputs)
        assert np.array_equal(from_candidates[0], from_all[0])
        assert np.array_equal(from_candidates[2], from_all[2])
    none = {name: option for name, option in penalties(5, 16).items() if name != "bias"}
    none |= {"repetition": column(1.0, 5), "presence": column(0.0, 5), "frequency": column(0.0, 5)}
    searched = simulate.World("trn2").launch(kernels.sample, [(candidate_inputs, none)]).outputs[0]
    assert all(np.array_equal(one, other) for one, other in zip(searched, from_candidates))


@pytest.mark.parametrize(
    ("cuts", "cores"), [([100], 1), ([64, 300, 650], 1), pytest.param([100], 2, marks=pytest.mark.slow)]
)
def test_every_rank_draws_what_one_rank_draws(cuts: list[int], cores: int) -> None:
    """On two cores the first one draws, whatever the schedule."""
    inputs = mixed(9, 700)
    edges = [0, *cuts, 700]
    ranks = len(edges) - 1
    shards = [
        (
            (inputs[0][:, a:b].copy(), *inputs[1:]),
            {
                "vocab_offset": np.int32([[a]]),
                "replica_group": ReplicaGroup([list(range(ranks))]),
                "num_ranks": ranks,
            },
        )
        for a, b in pairwise(edges)
    ]
    alone = run(kernels.sample, inputs)
    spacing = np.spacing(np.abs(alone[3]).max())
    world, launches = simulate.World("trn2", ranks, cores), []
    seeds = 64 if cores > 1 else 0
    assert find_faults(lambda: launches.append(world.launch(kernels.sample, shards)), seeds=seeds) == []
    for output in launches[0].outputs:
        assert np.array_equal(output[0], alone[0])
        assert np.array_equal(output[2], alone[2])
        assert np.abs(output[3] - alone[3]).max() <= 2 * spacing  # the sums of exp are added in another order


class TestSampleOnTwoCores(KernelTests):
    """Cores divide the rows; an only row is the first core's."""

    case = KernelCase(
        kernels.sample,
        mixed,
        two_cores=[
            dict(rows=5, columns=300)
            | penalties(5, 300)
            | dict(
                ids=np.random.default_rng(7).permuted(np.tile(np.arange(300, dtype=np.int32), (5, 1)), axis=1)
            ),
            *slow(dict(rows=1, columns=300)),
        ],
        seeds=64,
    )


def refused(rows: int = 2, columns: int = 24, candidates: int = 24) -> tuple[Any, ...]:
    return arguments(normal(23, rows, columns), np.full(rows, 0.5), candidates=candidates)


COUNTS = dict(output_counts=np.zeros((2, 24), F32))
EVERY = COUNTS | {name: column(1.0, 2) for name in ("repetition", "presence", "frequency")}


class TestLimitsOfSample(KernelTests):
    """Values are compared with an oracle above: these are the sizes that are taken, and what is refused."""

    case = KernelCase(
        kernels.sample,
        refused,
        refusals=[
            refuse("the largest 32 (25 candidates, a multiple of 8) of 24 columns", candidates=25),
            refuse("candidates is 0; at least 1 is wanted", dict(candidates=1), candidates=0),
            refuse("uniform is [2, 1], not (1, 1)", uniform=lambda uniform: uniform[:1]),
            refuse("ids is [2, 24], not (2, 8)", ids=np.zeros((2, 8), np.int32)),
            refuse("output_counts needs repetition, presence and frequency", **COUNTS),
            refuse("penalties and prompt_counts need output_counts", presence=column(1.0, 2)),
            refuse("output_counts is [2, 24]", EVERY, output_counts=np.zeros((2, 23), F32)),
            refuse("2 ranks, but no replica_group", num_ranks=2),
        ],
        limits=[
            limit(
                "rows", 128, "sample takes at most 128 rows, not 129", dry=True, columns=2000, candidates=64
            )
        ],
        fits=[
            dict(rows=128, columns=9000, candidates=candidates)
            | dict.fromkeys(("bias", "prompt_counts", "output_counts"), np.empty((128, 9000), F32))
            | dict.fromkeys(("repetition", "presence", "frequency"), column(1.0, 128))
            for candidates in (64, 1024)
        ],
    )

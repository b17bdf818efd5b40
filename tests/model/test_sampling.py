"""Laws of choosing a token, and agreement with transformers' filters."""

from __future__ import annotations

import numpy as np
import pytest

from model.errors import ModelError
from model.sampling import Sampler, SamplingOptions, StepOutput

LOGITS = np.random.default_rng(0).standard_normal(40).astype(np.float32) * 3
GREEDY = SamplingOptions()


def candidates(logits: np.ndarray, count: int) -> StepOutput:
    """What lm_head picks out: the largest logits, best first."""
    order = np.argsort(-logits, kind="stable")[:count]
    return StepOutput(None, logits[order], order.astype(np.int32))


def draws(options: SamplingOptions, step: StepOutput, count: int) -> list[int]:
    sampler = Sampler(options)
    return [sampler.choose(step) for _ in range(count)]


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id() -> None:
    assert draws(GREEDY, StepOutput(LOGITS), 3) == [int(np.argmax(LOGITS))] * 3
    tied = np.array([0, 5, 1, 5], np.float32)
    assert draws(GREEDY, StepOutput(tied), 1) == [1]
    assert draws(GREEDY, StepOutput(None, tied[[3, 1]], np.array([3, 1])), 1) == [1]


@pytest.mark.parametrize("seed", range(5))
def test_top_k_of_one_is_greedy(seed) -> None:
    assert (
        draws(SamplingOptions(1.5, top_k=1, seed=seed), StepOutput(LOGITS), 20)
        == [int(np.argmax(LOGITS))] * 20
    )


def test_tiny_top_p_is_greedy() -> None:
    assert draws(SamplingOptions(1.0, top_p=1e-9), StepOutput(LOGITS), 20) == [int(np.argmax(LOGITS))] * 20


def test_low_temperature_tends_to_greedy_and_high_to_uniform() -> None:
    assert set(draws(SamplingOptions(1e-3), StepOutput(LOGITS), 50)) == {int(np.argmax(LOGITS))}
    assert len(set(draws(SamplingOptions(1e6), StepOutput(LOGITS), 2000))) == len(LOGITS)


def test_a_seed_decides_everything() -> None:
    first = draws(SamplingOptions(1.0, seed=7), StepOutput(LOGITS), 50)
    assert first == draws(SamplingOptions(1.0, seed=7), StepOutput(LOGITS), 50)
    assert first != draws(SamplingOptions(1.0, seed=8), StepOutput(LOGITS), 50)


@pytest.mark.parametrize(
    "options", [SamplingOptions(0.7, 8, 0.9, 3), SamplingOptions(1.3, 5, 1.0, 4), GREEDY]
)
@pytest.mark.parametrize("count", [8, 16])
def test_candidates_choose_like_all_logits(options, count) -> None:
    assert draws(options, candidates(LOGITS, count), 200) == draws(options, StepOutput(LOGITS), 200)


def test_logits_are_used_where_candidates_do_not_suffice() -> None:
    short = candidates(LOGITS, 8)
    options = SamplingOptions(1.0, top_k=9)
    assert draws(options, StepOutput(LOGITS, short.values, short.ids), 200) == draws(
        options, StepOutput(LOGITS), 200
    )


def test_a_rounding_difference_hardly_moves_a_choice() -> None:
    """Candidates lie in the order of ids, so two nearly equal logits may change places without any effect."""
    twins = np.array([1.0, 1.0 + 1e-6, 0.0, 1.0], np.float32)
    swapped = np.array([1.0 + 1e-6, 1.0, 0.0, 1.0], np.float32)
    options = SamplingOptions(1.0)
    assert draws(options, StepOutput(twins), 500) == draws(options, StepOutput(swapped), 500)


def test_frequencies_follow_the_distribution() -> None:
    """Hoeffding: n draws miss a probability by more than t with a chance below 2 exp(-2 n t^2).

    t is chosen for a chance of one in a million over all tokens; the seed is fixed, so the test cannot fail at random.
    """
    count = 20_000
    options = SamplingOptions(0.8, seed=1)
    seen = np.bincount(draws(options, StepOutput(LOGITS), count), minlength=len(LOGITS)) / count
    weights = np.exp(LOGITS.astype(np.float64) / 0.8)
    bound = np.sqrt(np.log(2 * len(LOGITS) / 1e-6) / (2 * count))
    assert np.abs(seen - weights / weights.sum()).max() <= bound


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
def test_top_p_keeps_the_fewest_tokens_of_that_mass(top_p) -> None:
    weights = np.exp(LOGITS.astype(np.float64))
    weights /= weights.sum()
    order = np.argsort(-weights)
    mass = np.cumsum(weights[order])
    wanted = set(order[: int(np.searchsorted(mass, top_p)) + 1].tolist())
    seen = set(draws(SamplingOptions(1.0, top_p=top_p), StepOutput(LOGITS), 5000))
    assert seen <= wanted
    likely = {
        token for token in wanted if weights[token] > 0.005
    }  # 5000 draws miss one with a chance below 1e-10
    assert likely <= seen


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 10, 0.8), (1.5, 40, 0.6), (1.0, 3, 1.0), (2.0, 20, 0.95)]
)
def test_filters_agree_with_transformers(transformers_llama, temperature, top_k, top_p) -> None:
    import torch
    from transformers.generation import logits_process as theirs

    scores = torch.tensor(LOGITS)[None]
    for warper in (
        theirs.TemperatureLogitsWarper(temperature),
        theirs.TopKLogitsWarper(top_k),
        theirs.TopPLogitsWarper(top_p),
    ):
        scores = warper(None, scores)
    kept = set(torch.nonzero(torch.isfinite(scores[0]))[:, 0].tolist())
    seen = set(draws(SamplingOptions(temperature, top_k, top_p), StepOutput(LOGITS), 5000))
    assert seen <= kept
    chances = torch.softmax(scores[0], 0)
    assert {token for token in kept if chances[token] > 0.005} <= seen


def test_infinite_logits_are_never_chosen() -> None:
    masked = LOGITS.copy()
    masked[::2] = -np.inf
    assert all(token % 2 for token in draws(SamplingOptions(1.0), StepOutput(masked), 500))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(1.0), SamplingOptions(1.0, top_k=4)])
def test_refuses_logits_that_are_not_numbers(options, value) -> None:
    broken = LOGITS.copy()
    broken[3] = value
    with pytest.raises(ModelError, match="the model's largest logit is"):
        Sampler(options).choose(StepOutput(broken))


@pytest.mark.parametrize(
    "options", [dict(temperature=-0.1), dict(temperature=float("nan")), dict(temperature=float("inf"))]
)
def test_refuses_a_temperature_below_zero(options) -> None:
    with pytest.raises(ModelError, match=r"temperature .*; must be 0 or a positive number"):
        SamplingOptions(**options)


@pytest.mark.parametrize("top_p", [0.0, -0.5, 1.0001, float("nan")])
def test_refuses_top_p_outside_zero_to_one(top_p) -> None:
    with pytest.raises(ModelError, match=r"top-p .*; must be above 0 and at most 1"):
        SamplingOptions(top_p=top_p)


def test_limits_are_accepted() -> None:
    SamplingOptions(temperature=0.0, top_k=1, top_p=1.0, seed=0)
    with pytest.raises(ModelError, match="top-k 0; must be at least 1"):
        SamplingOptions(top_k=0)
    with pytest.raises(ModelError, match="seed -1; must not be negative"):
        SamplingOptions(seed=-1)


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    assert draws(SamplingOptions(1.0, top_k=1000), StepOutput(LOGITS), 100) == draws(
        SamplingOptions(1.0), StepOutput(LOGITS), 100
    )

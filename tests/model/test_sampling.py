"""Laws of choosing a token, and agreement with transformers' filters."""

from __future__ import annotations

import numpy as np
import pytest

from model.engine import SamplingParams
from model.engine.sampler import TokenSampler, choose
from model.errors import ModelError
from model.sampling import StepOutput

LOGITS = np.random.default_rng(0).standard_normal(40).astype(np.float32) * 3
GREEDY = SamplingParams(temperature=0.0)


def draws(params: SamplingParams, output: StepOutput, count: int) -> list[int]:
    assert output.logits is not None
    sampler = TokenSampler(params, [], [], (params.seed or 0,), len(output.logits))
    tokens = []
    for _ in range(count):
        (row,) = sampler.rows()
        (choice,) = choose([(row, output)], str)
        if isinstance(choice, BaseException):
            raise choice
        sampler.take(choice.token)
        tokens.append(choice.token)
    return tokens


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id() -> None:
    assert draws(GREEDY, StepOutput(LOGITS), 3) == [int(np.argmax(LOGITS))] * 3
    tied = np.array([0, 5, 1, 5], np.float32)
    assert draws(GREEDY, StepOutput(tied), 1) == [1]
    assert StepOutput(tied).likeliest == StepOutput(None, tied[[3, 1]], np.array([3, 1])).likeliest == 1


@pytest.mark.parametrize("seed", range(5))
def test_top_k_of_one_is_greedy(seed) -> None:
    assert (
        draws(SamplingParams(temperature=1.5, top_k=1, seed=seed), StepOutput(LOGITS), 20)
        == [int(np.argmax(LOGITS))] * 20
    )


def test_tiny_top_p_is_greedy() -> None:
    assert (
        draws(SamplingParams(temperature=1.0, top_p=1e-9), StepOutput(LOGITS), 20)
        == [int(np.argmax(LOGITS))] * 20
    )


def test_low_temperature_tends_to_greedy_and_high_to_uniform() -> None:
    assert set(draws(SamplingParams(temperature=1e-3), StepOutput(LOGITS), 50)) == {int(np.argmax(LOGITS))}
    assert len(set(draws(SamplingParams(temperature=1e6), StepOutput(LOGITS), 2000))) == len(LOGITS)


def test_a_seed_decides_everything() -> None:
    first = draws(SamplingParams(temperature=1.0, seed=7), StepOutput(LOGITS), 50)
    assert first == draws(SamplingParams(temperature=1.0, seed=7), StepOutput(LOGITS), 50)
    assert first != draws(SamplingParams(temperature=1.0, seed=8), StepOutput(LOGITS), 50)


def test_a_rounding_difference_hardly_moves_a_choice() -> None:
    """Candidates lie in the order of ids, so two nearly equal logits may change places without any effect."""
    twins = np.array([1.0, 1.0 + 1e-6, 0.0, 1.0], np.float32)
    swapped = np.array([1.0 + 1e-6, 1.0, 0.0, 1.0], np.float32)
    options = SamplingParams(temperature=1.0)
    assert draws(options, StepOutput(twins), 500) == draws(options, StepOutput(swapped), 500)


@pytest.mark.slow
def test_frequencies_follow_the_distribution() -> None:
    """Hoeffding: n draws miss a probability by more than t with a chance below 2 exp(-2 n t^2).

    t is chosen for a chance of one in a million over all tokens; the seed is fixed, so the test cannot fail at random.
    """
    count = 20_000
    options = SamplingParams(temperature=0.8, seed=1)
    seen = np.bincount(draws(options, StepOutput(LOGITS), count), minlength=len(LOGITS)) / count
    weights = np.exp(LOGITS.astype(np.float64) / 0.8)
    bound = np.sqrt(np.log(2 * len(LOGITS) / 1e-6) / (2 * count))
    assert np.abs(seen - weights / weights.sum()).max() <= bound


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
def test_top_p_keeps_the_fewest_tokens_of_that_mass(top_p) -> None:
    weights = np.exp(LOGITS.astype(np.float64))
    weights /= weights.sum()
    order = np.argsort(-weights)
    mass = np.cumsum(weights[order])
    wanted = set(order[: int(np.searchsorted(mass, top_p)) + 1].tolist())
    seen = set(draws(SamplingParams(temperature=1.0, top_p=top_p), StepOutput(LOGITS), 5000))
    assert seen <= wanted
    likely = {
        token for token in wanted if weights[token] > 0.005
    }  # 5000 draws miss one with a chance below 1e-10
    assert likely <= seen


@pytest.mark.slow
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
    seen = set(
        draws(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p), StepOutput(LOGITS), 5000)
    )
    assert seen <= kept
    chances = torch.softmax(scores[0], 0)
    assert {token for token in kept if chances[token] > 0.005} <= seen


def test_infinite_logits_are_never_chosen() -> None:
    masked = LOGITS.copy()
    masked[::2] = -np.inf
    assert all(token % 2 for token in draws(SamplingParams(temperature=1.0), StepOutput(masked), 500))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "options", [GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=4)]
)
def test_refuses_logits_that_are_not_numbers(options, value) -> None:
    broken = LOGITS.copy()
    broken[3] = value
    with pytest.raises(ModelError, match="the model's largest logit is"):
        draws(options, StepOutput(broken), 1)
    with pytest.raises(ModelError, match="the model's largest logit is"):
        _ = StepOutput(broken).likeliest


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    assert draws(SamplingParams(temperature=1.0, top_k=1000), StepOutput(LOGITS), 100) == draws(
        SamplingParams(temperature=1.0), StepOutput(LOGITS), 100
    )

"""Speculation changes no token of a request, no end of it, and no distribution, whatever is proposed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from model.engine import SamplingParams
from tests.engine.text_engine import END, OPTIONS, Always, run, scores, text_engine, tokens_of

DRAFTING = replace(OPTIONS, speculative_tokens=3)
PROMPTS = ([1, 2, 3], [4, 5], [*range(20)], [7] * 9)
PROMPT = [1, 2, 7]
ALLOWED = (10, 11, 12, 13)


def greedy(prompt: list[int], count: int) -> list[int]:
    """Return the likeliest tokens behind a prompt."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(np.argmax(scores(text))))
    return text[len(prompt) :]


def answers(params: SamplingParams, proposer: Always | None) -> list[list[list[int]]]:
    """Return the tokens of all prompts, computed together."""
    engine = text_engine(OPTIONS if proposer is None else DRAFTING, pages=40, proposer=proposer)
    outputs = [engine.submit(str(n), prompt, params) for n, prompt in enumerate(PROMPTS)]
    run(engine)
    assert engine.scheduler.cache.free == 40
    return [tokens_of(output) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0.9, seed=3, max_tokens=20, n=2),
        SamplingParams(
            temperature=1.2, seed=4, max_tokens=12, top_k=9, presence_penalty=1.0, ignore_eos=True
        ),
        SamplingParams(temperature=0.7, seed=5, max_tokens=12, min_tokens=6, stop_token_ids=[*range(5, 25)]),
    ],
)
def test_drafts_change_no_token(params: SamplingParams) -> None:
    wanted = answers(params, None)
    right = wanted[0][0]
    for drafts in (right[1:4], right[2:5], (49, 49, 49), (END, END, END)):
        assert answers(params, Always(*drafts)) == wanted


@pytest.mark.parametrize("stop_index", range(1, 6))
def test_what_follows_a_stop_token_among_the_drafts_is_dropped(stop_index: int) -> None:
    text = greedy(PROMPT, 9)
    assert len(set(text)) == 9  # each token stands once
    params = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[text[stop_index]], ignore_eos=True)
    engine = text_engine(DRAFTING, proposer=Always(*text[1:4]))
    output = engine.submit("a", PROMPT, params)
    run(engine)
    assert output.outputs[0].token_ids == text[: stop_index + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", text[stop_index])
    assert engine.acceptance.accepted[0] > 0
    assert engine.scheduler.cache.free == 24


@pytest.mark.parametrize("most", range(1, 7))
def test_drafts_end_where_the_request_ends(most: int) -> None:
    text = greedy(PROMPT, 9)
    engine = text_engine(DRAFTING, proposer=Always(*text[1:4]))
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    output = engine.submit("a", PROMPT, params)
    run(engine)
    assert output.outputs[0].token_ids == text[:most]
    assert output.outputs[0].finish_reason == "length"


def probabilities(history: list[int]) -> np.ndarray:
    """Return the probabilities of the allowed tokens, in float64."""
    weights = np.exp(scores(history)[list(ALLOWED)].astype(np.float64))
    return weights / weights.sum()


def expected(prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of three tokens."""
    likelihoods = {}
    for text in product(ALLOWED, repeat=3):
        factors = [probabilities([*prompt, *text[:n]])[ALLOWED.index(text[n])] for n in range(3)]
        likelihoods[text] = float(np.prod(factors))
    return likelihoods


def chi_square(counts: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """Return the statistic, and what it exceeds once in a million; rare continuations are merged."""
    total = counts.total()
    often = [text for text, share in wanted.items() if share * total >= 5]
    pairs = [(counts[text], wanted[text] * total) for text in often]
    pairs.append(
        (total - sum(observed for observed, _ in pairs), total - sum(observed for _, observed in pairs))
    )
    freedom = len(pairs) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 4.753 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty
    return sum((observed - other) ** 2 / other for observed, other in pairs), bound


@pytest.mark.slow
@pytest.mark.parametrize("proposer", [None, Always(10, 10), Always(13, 11)])
def test_sampled_drafts_change_no_distribution(proposer: Always | None) -> None:
    engine = text_engine(OPTIONS if proposer is None else DRAFTING, proposer=proposer)
    params = SamplingParams(max_tokens=3, n=100, allowed_token_ids=ALLOWED, ignore_eos=True)
    prompt, counts = [3, 5, 9], Counter[tuple[int, ...]]()
    for number in range(20):
        output = engine.submit(str(number), prompt, params)
        run(engine)
        counts.update(tuple(token_ids) for token_ids in tokens_of(output))
    wanted = expected(prompt)
    statistic, bound = chi_square(counts, wanted)
    assert statistic < bound
    if proposer is not None:
        assert 0 < engine.acceptance.accepted[0] < engine.acceptance.verified[0]


def test_a_distribution_that_takes_every_second_draft_is_found() -> None:
    wanted = expected([3, 5, 9])
    counts = Counter({text: round(2000 * share) for text, share in wanted.items()})
    statistic, bound = chi_square(counts, wanted)
    assert statistic < bound
    taken = Counter[tuple[int, ...]]()
    for (first, second, third), count in counts.items():
        taken[first, second, third] += count - count // 2
        taken[first, ALLOWED[0], third] += count // 2
    statistic, bound = chi_square(taken, wanted)
    assert statistic > bound

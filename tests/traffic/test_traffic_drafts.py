"""Drafts on a clock: tokens of a step against the closed form, the time of a draft model, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import sqrt

import numpy as np
import pytest

from model.engine import Scheduler
from model.errors import ModelError
from model.state import PagePool
from model.traffic.clock import Clock
from model.traffic.drafts import AcceptanceRates, DraftProposer, MeasuredOutcomes, Outcomes
from model.traffic.record import Record
from model.traffic.replica import Replica
from model.traffic.service import serve
from model.traffic.workload import Query, Workload
from tests.deep import deep_except
from tests.traffic.clocks import MEAN_NS, OPTIONS, Constant, shaped, workloads


def served(
    workload: Workload,
    outcomes: Outcomes,
    clock: Clock,
    tokens: int = 3,
    draft_clock: Clock | None = None,
    pages: int = 64,
) -> Record:
    options = replace(OPTIONS, speculative_tokens=tokens)
    scheduler = Scheduler(PagePool(pages, 4), options)
    return serve(Replica(scheduler, clock, DraftProposer(outcomes, draft_clock, 7)), workload)


def alone(new: int, outcomes: Outcomes, tokens: int = 3, draft_clock: Clock | None = None) -> Record:
    workload = Workload((Query(1, new),), (0,))
    return served(workload, outcomes, Constant(), tokens, draft_clock, pages=new)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "tokens"), deep_except(product([0.0, 0.4, 0.7, 1.0], [1, 3, 7]), 4))
def test_a_request_alone_gets_as_many_tokens_of_a_step_as_the_closed_form_says(
    rate: float, tokens: int
) -> None:
    """1 + a + a^2 + … + a^k = (1 - a^(k + 1)) / (1 - a) tokens, a step being independent of another."""
    record = alone(20_001, AcceptanceRates.parse(str(rate), tokens), tokens)
    steps = record.steps - 1  # the first one computes the prompt
    expected = tokens + 1 if rate == 1 else (1 - rate ** (tokens + 1)) / (1 - rate)
    counts = np.arange(1, tokens + 2)
    share = np.array([rate**position - rate ** (position + 1) for position in range(tokens)] + [rate**tokens])
    spread = sqrt(max(0.0, (share * counts**2).sum() - expected**2))
    # The last step may verify fewer drafts than the others.
    assert 20_000 / steps == pytest.approx(expected, abs=4 * spread / sqrt(steps) + tokens / steps)


@pytest.mark.slow
def test_each_place_has_its_own_rate() -> None:
    record = alone(20_001, AcceptanceRates.parse("0.9,0.5", 3))
    verified = record.acceptance.verified[0]
    for acceptance_rate, expected in zip(record.acceptance.rates, (0.9, 0.45, 0.225), strict=True):
        assert acceptance_rate == pytest.approx(expected, abs=4 * sqrt(expected * (1 - expected) / verified))


def test_tokens_of_one_step_come_together() -> None:
    record = alone(1 + 4 * 50, AcceptanceRates.parse("1", 3))
    assert record.gaps_ns == {MEAN_NS: 50, 0: 150}
    assert record.end_ns == 51 * MEAN_NS


def test_a_draft_model_takes_a_step_for_the_prompt_and_one_for_each_draft() -> None:
    record = alone(1 + 4 * 50, AcceptanceRates.parse("1", 3), draft_clock=Constant())
    assert record.end_ns == (2 + 50 * (1 + 3)) * MEAN_NS
    assert alone(1 + 4 * 50, AcceptanceRates.parse("1", 3)).end_ns == 51 * MEAN_NS


@pytest.mark.slow
@pytest.mark.parametrize("pages", [24, 64])
@pytest.mark.parametrize("drafting", [False, True])
def test_times_add_up(drafting: bool, pages: int) -> None:
    clock = shaped(replace(OPTIONS, speculative_tokens=3))
    for workload in workloads(4):
        rates = AcceptanceRates.parse("0.8,0.6", 3)
        record = served(workload, rates, clock, draft_clock=clock if drafting else None, pages=pages)
        assert len(record.timelines) == len(workload.queries)
        for timeline in record.timelines:
            assert timeline.arrival_ns <= timeline.started_ns < timeline.first_token_ns <= timeline.end_ns
        assert record.gaps_ns.total() == sum(timeline.query.new_tokens - 1 for timeline in record.timelines)
        gaps = sum(gap * count for gap, count in record.gaps_ns.items())
        assert gaps == sum(timeline.end_ns - timeline.first_token_ns for timeline in record.timelines)
        assert record.busy_ns <= record.end_ns
        assert all(before.end_ns <= after.begin_ns for before, after in zip(record.spans, record.spans[1:]))


def test_drafts_end_a_request_in_fewer_steps_of_equal_sizes() -> None:
    none, some = (alone(200, AcceptanceRates.parse(rate, 3)) for rate in ("0", "0.7"))
    assert some.end_ns < none.end_ns
    assert none.gaps_ns == {MEAN_NS: 199}


def test_a_text_says_what_prompt_lookup_finds() -> None:
    """Of a text of period 5, two tokens stand again from the seventh on; from there every draft is right."""
    measured = MeasuredOutcomes.measure([1, 2, 3, 4, 5] * 20, 4)
    assert measured.steps == ((0, 0),) * 6 + ((4, 4),) * 18 + ((3, 3),)
    assert MeasuredOutcomes.measure([1, 2, 3, 1, 2, 9, 9], 2).steps == ((0, 0),) * 4 + ((2, 0), (0, 0))
    assert MeasuredOutcomes.measure([1, 2], 2).steps == ((0, 0),)
    with pytest.raises(ModelError, match="the text has 1 tokens; acceptance is measured on 2 at least"):
        MeasuredOutcomes.measure([1], 2)


@pytest.mark.slow
def test_steps_of_a_text_are_drawn_as_often_as_they_are_there() -> None:
    record = alone(20_001, MeasuredOutcomes(((0, 0), (3, 2), (3, 3), (0, 0))))
    verified, accepted = record.acceptance.verified, record.acceptance.accepted
    steps = record.steps - 1
    assert verified[0] == pytest.approx(steps / 2, abs=4 * sqrt(steps / 4))
    assert accepted[1] == pytest.approx(verified[1], abs=2)  # but where the last step has fewer slots
    assert accepted[2] == pytest.approx(steps / 4, abs=4 * sqrt(steps * 3 / 16))


@pytest.mark.parametrize("text", ["", "x", "-0.1", "1.1", "nan", "0.5,", "0.5,0.5,0.5,0.5"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ModelError, match=r"acceptance .*; write 0.7, or 0.7,0.5"):
        AcceptanceRates.parse(text, 3)


@pytest.mark.parametrize(
    ("text", "rates"), [("0", (0, 0, 0)), ("1", (1, 1, 1)), ("0.5,0.4,0.3", (0.5, 0.4, 0.3))]
)
def test_rates_from_0_to_1_are_taken(text: str, rates: tuple[float, ...]) -> None:
    assert AcceptanceRates.parse(text, 3).rates == rates

"""The scheduler on a clock: queueing theory, sums of times, steps at once equal to single steps."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from model.engine import Batch, Scheduler, SchedulerOptions
from model.plan.service_level import ServiceLevel
from model.state import PagePool
from model.traffic.clock import Clock, StepTime
from model.traffic.lengths import Lengths
from model.traffic.record import Record, Timeline
from model.traffic.replica import Replica
from model.traffic.report import compute_percentiles, summarize
from model.traffic.service import serve
from model.traffic.workload import (
    SECOND_NS,
    Query,
    SharedPrefix,
    Workload,
    draw_poisson_arrivals,
    draw_queries,
)
from tests.deep import deep_except
from tests.traffic.clocks import MEAN_NS, OPTIONS, Constant, shaped, workloads


class Exponential:
    """Steps of exponential times."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(5)

    def step(self, batch: Batch) -> StepTime:
        """Draw a time anew."""
        return StepTime(1 + int(self._draw.exponential(MEAN_NS)))


def served(
    workload: Workload,
    clock: Clock,
    options: SchedulerOptions,
    pages: int = 64,
    at_once: bool = True,
) -> Record:
    return serve(Replica(Scheduler(PagePool(pages, 4), options), clock, joins_steps=at_once), workload)


def alone(clock: Clock, load: float) -> Record:
    """Run a server whose requests arrive at random and take one step each."""
    queries = [Query(1, 1)] * 30_000
    workload = draw_poisson_arrivals(queries, load * SECOND_NS / MEAN_NS, np.random.default_rng(11))
    return served(workload, clock, SchedulerOptions(max_num_seqs=1, prefix_caching=False))


def mean_and_error(timelines: list[Timeline], values: list[float]) -> tuple[float, float]:
    """Return the mean of a value of requests and its standard error over cycles of an idle server."""
    first = [number for number, timeline in enumerate(timelines) if timeline.queue_ns == 0]
    sums, counts = np.add.reduceat(np.array(values, float), first), np.diff([*first, len(timelines)])
    mean = sum(values) / len(timelines)
    return mean, sqrt(np.sum((sums - mean * counts) ** 2)) / len(timelines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clock", "factor", "load"),
    deep_except(
        [(Exponential, 1.0, 0.3), (Exponential, 1.0, 0.5), (Constant, 0.5, 0.3), (Constant, 0.5, 0.5)], 3
    ),
)
def test_a_single_server_waits_as_queueing_theory_says(
    clock: type[Clock], factor: float, load: float
) -> None:
    """M/M/1: load / (1 - load) times of service in the queue; M/D/1: half of that. Poisson arrivals see the mean."""
    record = alone(clock(), load)
    mean, error = mean_and_error(record.timelines, [timeline.queue_ns for timeline in record.timelines])
    assert mean == pytest.approx(factor * MEAN_NS * load / (1 - load), abs=4 * error)
    assert error < 0.05 * mean
    waiting, error = mean_and_error(
        record.timelines, [timeline.queue_ns > 0 for timeline in record.timelines]
    )
    assert waiting == pytest.approx(load, abs=4 * error)
    assert error < 0.05 * load


KINDS = (
    OPTIONS,
    replace(OPTIONS, chunked_prefill=False, max_num_batched_tokens=64),
    replace(OPTIONS, prefix_caching=False),
    replace(OPTIONS, continuous=False),
)


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("pages", deep_except([24, 64], 2))
def test_steps_at_once_take_the_times_of_single_steps(options: SchedulerOptions, pages: int) -> None:
    saved = 0
    for workload in workloads(pages):
        at_once = served(workload, shaped(options), options, pages)
        single = served(workload, shaped(options), options, pages, at_once=False)
        for one, other in zip(at_once.timelines, single.timelines, strict=True):
            assert vars(one) == vars(other)
        assert at_once.gaps_ns == single.gaps_ns
        assert (at_once.steps, at_once.tokens, at_once.padding) == (
            single.steps,
            single.tokens,
            single.padding,
        )
        assert (at_once.busy_ns, at_once.end_ns) == (single.busy_ns, single.end_ns)
        saved += len(single.spans) - len(at_once.spans)
    assert saved > 100


@pytest.mark.parametrize("options", KINDS)
def test_times_add_up(options: SchedulerOptions) -> None:
    for workload in workloads(3):
        record = served(workload, shaped(options), options, 24)
        timelines = record.timelines
        assert len(timelines) == len(workload.queries)
        for timeline in timelines:
            assert timeline.arrival_ns <= timeline.started_ns < timeline.first_token_ns <= timeline.end_ns
            decode = timeline.mean_itl_ns * (timeline.query.new_tokens - 1)
            assert timeline.queue_ns + (
                timeline.first_token_ns - timeline.started_ns
            ) + decode == pytest.approx(timeline.e2e_ns)
        # Every token but a request's first one ends a gap, and the gaps of a request are its time of decoding.
        assert record.gaps_ns.total() == sum(timeline.query.new_tokens - 1 for timeline in timelines)
        gaps = sum(gap * count for gap, count in record.gaps_ns.items())
        assert gaps == sum(timeline.end_ns - timeline.first_token_ns for timeline in timelines)
        assert all(before.end_ns <= after.begin_ns for before, after in zip(record.spans, record.spans[1:]))
        run = summarize([record], ServiceLevel(ttft=1e6), 24)
        assert 0 < run.utilisation <= 1
        assert sum(time_slice.preemptions for time_slice in run.slices) == run.preemptions
        area = sum(
            time_slice.running * (time_slice.end_ns - time_slice.begin_ns) for time_slice in run.slices
        )
        assert area == pytest.approx(
            sum(span.running * (span.end_ns - span.begin_ns) for span in record.spans)
        )


def test_users_have_one_request_each_on_its_way() -> None:
    queries = (Query(8, 8),) * 40
    record = served(Workload(queries, users=4, think_ns=50), shaped(OPTIONS), OPTIONS)
    arrivals = sorted(timeline.arrival_ns for timeline in record.timelines)
    ends = sorted(timeline.end_ns for timeline in record.timelines)
    assert arrivals[:4] == [0] * 4
    assert arrivals[4:] == [end + 50 for end in ends[: len(queries) - 4]]


def test_a_shared_prefix_is_computed_once() -> None:
    queries = draw_queries(
        20, Lengths("constant", 6), Lengths("constant", 2), SharedPrefix(32, 1), np.random.default_rng(0)
    )
    cached = served(Workload(queries, users=1), shaped(OPTIONS), OPTIONS)
    plain = served(Workload(queries, users=1), shaped(OPTIONS), KINDS[2])
    assert [timeline.cached_tokens for timeline in cached.timelines] == [0] + [32] * 19
    assert cached.tokens == plain.tokens - 19 * 32


def test_percentiles_are_the_least_values_that_so_many_do_not_exceed() -> None:
    assert compute_percentiles(dict.fromkeys(range(1, 101), 1)) == {50: 50, 90: 90, 99: 99}
    assert compute_percentiles({7: 1}) == {50: 7, 90: 7, 99: 7}
    assert compute_percentiles({1: 9, 5: 1}) == {50: 1, 90: 1, 99: 5}

"""Summary of a run of `nkw traffic`: times at percentiles, throughput, goodput, page use over time, token prices."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from statistics import mean

from model.engine.speculation import Acceptance
from model.plan.prices import compute_price_per
from model.plan.service_level import ServiceLevel
from model.traffic.record import NOT_YET, Record
from model.traffic.workload import SECOND_NS

PERCENTILES = (50, 90, 99)
_EVERY_PERCENT = range(1, 101)
_SLICES = 8
MOMENTS = 64
"""Slices of a run in charts over time."""


Percentiles = Mapping[int, float]


def compute_percentiles(counts: Mapping[int, int], percents: Iterable[int] = PERCENTILES) -> Percentiles:
    """Return the percentile of some numbers for each percent p, by nearest rank.

    It is the smallest of the numbers such that at least p percent of all are no larger.

    Args:
        counts: Frequency of each number. Without any number every percentile is 0.0.
        percents: Whole percents from 1 to 100.
    """
    numbers = sorted(counts)
    ranks = list(accumulate(counts[number] for number in numbers))
    needed = {percent: ceil(sum(counts.values()) * percent / 100) for percent in percents}
    return {
        percent: numbers[bisect_left(ranks, rank)] if numbers else 0.0 for percent, rank in needed.items()
    }


@dataclass(frozen=True)
class Slice:
    """One of several equal stretches of a run's time, for all replicas together.

    `pages`, `running` and `waiting` are means over the slice: the share of all pages in use, from 0 to 1, and numbers
    of requests. `most_pages` is the largest share that one replica uses at any time. `met` of the `completed` requests
    kept the service level.
    """

    begin_ns: int
    end_ns: int
    pages: float
    most_pages: float
    running: float
    waiting: float
    preemptions: int
    completed: int
    met: int


@dataclass(frozen=True)
class Summary:
    """Summary of a run on all replicas; times are in ns, at every percent from 1 to 100.

    | field | meaning |
    |---|---|
    | `handover` | times from first tokens to the arrival of pages at decoding replicas, or None without a handover |
    | `met` | number of requests that kept the service level |
    | `utilisation` | share of the time in which steps run, mean over the replicas |
    | `utilisations` | the same of prefill replicas and of decoding replicas, or None where each replica does both |
    | `prompts` | share of the steps' time that chunks of prompts take |
    | `acceptance` | share of verified draft tokens that were accepted, by draft position |
    | `slices`, `moments` | the run over time in 8 slices for tables, and in 64 for charts |
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    ttft: Percentiles
    itl: Percentiles
    e2e: Percentiles
    queue: Percentiles
    handover: Percentiles | None
    met: int
    elapsed_ns: int
    utilisation: float
    utilisations: tuple[float, float] | None
    prompts: float
    acceptance: tuple[float, ...]
    steps: int
    computed_tokens: int
    padding: int
    preemptions: int
    slices: tuple[Slice, ...]
    moments: tuple[Slice, ...]

    @property
    def requests_per_s(self) -> float:
        """Completed requests per second."""
        return self.requests * SECOND_NS / self.elapsed_ns

    @property
    def goodput_per_s(self) -> float:
        """Completed requests per second that kept the service level."""
        return self.met * SECOND_NS / self.elapsed_ns

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second."""
        return self.new_tokens * SECOND_NS / self.elapsed_ns

    def dollars_per_million(self, price: float) -> float:
        """Return the dollars per million new tokens, which pay the whole instance, prompts and idle time included.

        Args:
            price: Price of the instance in dollars an hour.
        """
        return compute_price_per(1_000_000, self.tokens_per_s, price)

    def dollars_per_million_input(self, price: float) -> float:
        """Return the dollars per million tokens of prompts.

        Prompts pay the share of the instance's time that their chunks take of the steps' time, idle time included.

        Args:
            price: Price of the instance in dollars an hour.
        """
        return self.prompts * self.dollars_per_million(price) * self.new_tokens / self.prompt_tokens

    def dollars_per_million_output(self, price: float) -> float:
        """Return the dollars per million new tokens, without the share of the time that prompts pay.

        Args:
            price: Price of the instance in dollars an hour.
        """
        return (1 - self.prompts) * self.dollars_per_million(price)


def summarize(
    records: Sequence[Record], level: ServiceLevel, pages: int, prefill_replicas: int = 0
) -> Summary:
    """Summarize a run.

    Args:
        records: A record for each replica; those of prefill replicas come first.
        level: Service level that requests should keep.
        pages: Number of pages of one replica.
        prefill_replicas: Number of replicas that only compute prompts.
    """
    timelines = [timeline for record in records for timeline in record.timelines]
    elapsed_ns = max(record.end_ns for record in records)
    gaps_ns = sum((record.gaps_ns for record in records), Counter[int]())
    verified = sum((record.acceptance.verified for record in records), Counter[int]())
    accepted = sum((record.acceptance.accepted for record in records), Counter[int]())
    moved = Counter(timeline.handover_ns for timeline in timelines if timeline.moved_ns != NOT_YET)
    busy_ns = [record.busy_ns for record in records]
    return Summary(
        requests=len(timelines),
        prompt_tokens=sum(timeline.query.prompt_tokens for timeline in timelines),
        new_tokens=sum(timeline.query.new_tokens for timeline in timelines),
        cached_tokens=sum(timeline.cached_tokens for timeline in timelines),
        ttft=compute_all_percentiles(timeline.ttft_ns for timeline in timelines),
        itl=compute_percentiles(gaps_ns, _EVERY_PERCENT),
        e2e=compute_all_percentiles(timeline.e2e_ns for timeline in timelines),
        queue=compute_all_percentiles(timeline.queue_ns for timeline in timelines),
        handover=compute_percentiles(moved, _EVERY_PERCENT) if moved else None,
        met=sum(map(level.is_met, timelines)),
        elapsed_ns=elapsed_ns,
        utilisation=mean(busy_ns) / elapsed_ns,
        utilisations=(
            mean(busy_ns[:prefill_replicas]) / elapsed_ns,
            mean(busy_ns[prefill_replicas:]) / elapsed_ns,
        )
        if prefill_replicas
        else None,
        prompts=sum(record.prompts_ns for record in records) / sum(busy_ns),
        acceptance=tuple(Acceptance(verified, accepted).rates),
        steps=sum(record.steps for record in records),
        computed_tokens=sum(record.tokens for record in records),
        padding=sum(record.padding for record in records),
        preemptions=sum(timeline.preemptions for timeline in timelines),
        slices=tuple(_slice_run(records, level, pages, elapsed_ns, _SLICES)),
        moments=tuple(_slice_run(records, level, pages, elapsed_ns, MOMENTS)),
    )


def compute_all_percentiles(times_ns: Iterable[int]) -> Percentiles:
    """Return the percentiles of times from 1 % to 100 %, by percent."""
    return compute_percentiles(Counter(times_ns), _EVERY_PERCENT)


def _slice_run(
    records: Sequence[Record], level: ServiceLevel, pages: int, elapsed_ns: int, count: int
) -> Iterable[Slice]:
    """Yield the `count` slices of a run of `elapsed_ns`, in order; a run of fewer nanoseconds has fewer slices.

    Slices have equal lengths in whole ns, except that the last one may be shorter.

    Args:
        records: A record for each replica.
        level: Service level that requests should keep.
        pages: Number of pages of one replica.
        elapsed_ns: Time of the run.
        count: Number of slices.
    """
    length_ns = max(1, -(-elapsed_ns // count))
    used, most_used, running, waiting = ([0.0] * count for _ in range(4))
    preemptions, completed, met = ([0] * count for _ in range(3))
    for record in records:
        for timeline in record.timelines:
            index = (timeline.end_ns - 1) // length_ns
            completed[index] += 1
            met[index] += level.is_met(timeline)
        for span in record.spans:
            preemptions[span.begin_ns // length_ns] += span.preempted
            for index in range(span.begin_ns // length_ns, (span.end_ns - 1) // length_ns + 1):
                begin_ns, end_ns = index * length_ns, (index + 1) * length_ns
                time_ns = min(span.end_ns, end_ns) - max(span.begin_ns, begin_ns)
                used[index] += time_ns * span.pages
                most_used[index] = max(most_used[index], span.pages)
                running[index] += time_ns * span.running
                waiting[index] += time_ns * span.waiting
    for index in range(-(-elapsed_ns // length_ns)):
        begin_ns, end_ns = index * length_ns, min(elapsed_ns, (index + 1) * length_ns)
        time_ns = end_ns - begin_ns
        yield Slice(
            begin_ns,
            end_ns,
            used[index] / time_ns / (len(records) * pages),
            most_used[index] / pages,
            running[index] / time_ns,
            waiting[index] / time_ns,
            preemptions[index],
            completed[index],
            met[index],
        )

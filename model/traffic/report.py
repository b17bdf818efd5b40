"""What a run says: times at percentiles, throughput, goodput, page use over time, and what the tokens cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from model.engine.speculation import Acceptance
from model.errors import ModelError
from model.traffic.record import WAITS, Life, Record
from model.traffic.workload import SECOND_NS

PERCENTILES = (50, 90, 99)
SHARE = 0.99
"""Of the requests have to keep to a service level, as MLPerf's server scenario demands of language models."""

_UNITS_NS = {"us": 1e3, "ms": 1e6, "s": 1e9}
_EVERY_PERCENT = range(1, 101)
_SLICES = 8
MOMENTS = 64
"""Parts of a run in which its changes are shown."""


@dataclass(frozen=True)
class ServiceLevel:
    """The longest times that a request may take, in nanoseconds; None where nothing is asked.

    `ttft` is the time to first token, `itl` the mean time between the tokens of the request, `e2e` its whole life.
    """

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parsed(cls, text: str) -> ServiceLevel:
        """The level that a text such as ttft=500ms,itl=50ms names; ModelError for another text."""
        bounds: dict[str, float] = {}
        for each in text.split(","):
            match = re.fullmatch(r"(ttft|itl|e2e)=(\d{1,9}(?:\.\d{1,9})?)(us|ms|s)", each.strip())
            if match is None or match[1] in bounds or not float(match[2]):
                raise ModelError(
                    f"service level {text!r:.60}; write one or more of ttft, itl and e2e, each once and above 0, as in "
                    "ttft=500ms,itl=50ms,e2e=10s"
                )
            bounds[match[1]] = float(match[2]) * _UNITS_NS[match[3]]
        return cls(**bounds)

    def met(self, life: Life) -> bool:
        """Whether a request kept to it."""
        times = ((self.ttft, life.first_ns), (self.itl, life.between_ns), (self.e2e, life.whole_ns))
        return all(bound is None or time <= bound for bound, time in times)

    def holds(self, lives: Sequence[Life]) -> bool:
        """Whether enough of the requests kept to it."""
        return sum(map(self.met, lives)) >= SHARE * len(lives)


Percentiles = Mapping[int, float]


def percentiles(counts: Mapping[int, int], percents: Iterable[int] = PERCENTILES) -> Percentiles:
    """The least values that so many percent of all do not exceed; `counts` says how often each value occurs."""
    total, out, seen = sum(counts.values()), dict[int, float](), 0
    values = iter(sorted(counts.items()))
    value = 0.0
    for percent in percents:
        while seen < ceil(total * percent / 100):
            value, count = next(values)
            seen += count
        out[percent] = value
    return out


@dataclass(frozen=True)
class Slice:
    """A part of the run, all replicas together: means over its time, and the preemptions in it.

    Of the `completed` requests, `met` kept to the service level.
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
    """A run on all replicas. Times are in nanoseconds at every percent, `pages` of slices shares of all.

    `handover` are the times until the pages of prompts are where requests decode, and `utilisations` the shares of the
    time in which steps run on the replicas that compute prompts and on the others; None where each does both.
    `prompts` is the share of the steps' time that chunks of prompts take, and `acceptance` that of the right drafts
    among the verified ones, place by place.
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
        """Completed requests."""
        return self.requests * SECOND_NS / self.elapsed_ns

    @property
    def goodput_per_s(self) -> float:
        """Completed requests that kept to the service level."""
        return self.met * SECOND_NS / self.elapsed_ns

    @property
    def tokens_per_s(self) -> float:
        """New tokens."""
        return self.new_tokens * SECOND_NS / self.elapsed_ns

    def dollars_per_million(self, price: float) -> float:
        """Of new tokens, at a price of the instance in dollars an hour."""
        return price / 3600 / self.tokens_per_s * 1e6


def summary(records: Sequence[Record], level: ServiceLevel, pages: int, prefill_replicas: int = 0) -> Summary:
    """What the replicas did together; each of `records` has `pages` pages, and the first ones compute prompts only."""
    lives = [life for record in records for life in record.lives]
    gaps = sum((record.gaps_ns for record in records), Counter[int]())
    elapsed_ns = max(record.end_ns for record in records)
    moved = Counter(life.handover_ns for life in lives if life.moved_ns != WAITS)
    acceptance = Acceptance()
    for record in records:
        acceptance.verified += record.acceptance.verified
        acceptance.accepted += record.acceptance.accepted
    busy_ns = [record.busy_ns for record in records]
    return Summary(
        requests=len(lives),
        prompt_tokens=sum(life.query.prompt for life in lives),
        new_tokens=sum(life.query.new for life in lives),
        cached_tokens=sum(life.cached_tokens for life in lives),
        ttft=_at_every_percent(life.first_ns for life in lives),
        itl=percentiles(gaps, _EVERY_PERCENT),
        e2e=_at_every_percent(life.whole_ns for life in lives),
        queue=_at_every_percent(life.queue_ns for life in lives),
        handover=percentiles(moved, _EVERY_PERCENT) if moved else None,
        met=sum(map(level.met, lives)),
        elapsed_ns=elapsed_ns,
        utilisation=_mean(busy_ns) / elapsed_ns,
        utilisations=(
            _mean(busy_ns[:prefill_replicas]) / elapsed_ns,
            _mean(busy_ns[prefill_replicas:]) / elapsed_ns,
        )
        if prefill_replicas
        else None,
        prompts=sum(record.prompts_ns for record in records) / sum(busy_ns),
        acceptance=tuple(acceptance.rates),
        steps=sum(record.steps for record in records),
        computed_tokens=sum(record.tokens for record in records),
        padding=sum(record.padding for record in records),
        preemptions=sum(life.preemptions for life in lives),
        slices=tuple(_slices(records, level, pages, elapsed_ns, _SLICES)),
        moments=tuple(_slices(records, level, pages, elapsed_ns, MOMENTS)),
    )


def _at_every_percent(times_ns: Iterable[int]) -> Percentiles:
    return percentiles(Counter(times_ns), _EVERY_PERCENT)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _slices(
    records: Sequence[Record], level: ServiceLevel, pages: int, elapsed_ns: int, parts: int
) -> Iterable[Slice]:
    """Equal parts of the run."""
    length = max(1, -(-elapsed_ns // parts))
    sums = [[0.0] * 5 for _ in range(parts)]
    completed, met = Counter[int](), Counter[int]()
    for record in records:
        for life in record.lives:
            number = (life.end_ns - 1) // length
            completed[number] += 1
            met[number] += level.met(life)
        for span in record.spans:
            sums[span.begin_ns // length][4] += span.preempted
            for number in range(span.begin_ns // length, (span.end_ns - 1) // length + 1):
                own = sums[number]
                time_ns = min(span.end_ns, (number + 1) * length) - max(span.begin_ns, number * length)
                own[0] += time_ns * span.pages
                own[1] = max(own[1], span.pages)
                own[2] += time_ns * span.running
                own[3] += time_ns * span.waiting
    for number, (held, most, running, waiting, preempted) in enumerate(sums):
        begin, end = number * length, min(elapsed_ns, (number + 1) * length)
        time_ns = end - begin
        if time_ns > 0:
            yield Slice(
                begin,
                end,
                held / time_ns / (len(records) * pages),
                most / pages,
                running / time_ns,
                waiting / time_ns,
                int(preempted),
                completed[number],
                met[number],
            )

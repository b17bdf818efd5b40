"""One replica of a service: the engine's scheduler on a clock, with requests whose tokens nobody computes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from model.engine import Batch, Request, Scheduler
from model.traffic.clock import Clock, StepTime
from model.traffic.workload import Query, Workload

_WAITS = -1
"""The time of the last token of a request that has none yet."""


@dataclass(eq=False)
class Life:
    """The times of a request in nanoseconds: it came, its first step began, its first and its last token were there.

    `cached_tokens` of the prompt were there when it first started.
    """

    query: Query
    arrival_ns: int
    started_ns: int = _WAITS
    first_token_ns: int = _WAITS
    end_ns: int = _WAITS
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_ns(self) -> int:
        """From its arrival to its first step."""
        return self.started_ns - self.arrival_ns

    @property
    def first_ns(self) -> int:
        """Time to first token: from its arrival."""
        return self.first_token_ns - self.arrival_ns

    @property
    def between_ns(self) -> float:
        """The mean time between its tokens; 0 for a single one."""
        return (self.end_ns - self.first_token_ns) / max(1, self.query.new - 1)

    @property
    def whole_ns(self) -> int:
        """From its arrival to its last token."""
        return self.end_ns - self.arrival_ns


@dataclass(frozen=True)
class Span:
    """Steps in a row that are alike: when they began and ended, the pages held, and requests that run and wait."""

    begin_ns: int
    end_ns: int
    pages: int
    running: int
    waiting: int
    preempted: int


@dataclass
class Record:
    """What happened on one replica: requests in the order in which they ended, and every step.

    `gaps_ns` are the times between neighbouring tokens of a request, with how often each occurred.
    """

    lives: list[Life] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    gaps_ns: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    tokens: int = 0
    padding: int = 0

    @property
    def busy_ns(self) -> int:
        """The time of all steps."""
        return sum(span.end_ns - span.begin_ns for span in self.spans)

    @property
    def end_ns(self) -> int:
        """The end of the last step; a run begins at 0."""
        return self.spans[-1].end_ns


class Service:
    """A scheduler and a clock; `run` serves a workload until its last request has ended.

    `at_once` advances steps together between which nothing changes; the times are the same without it.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock, at_once: bool = True) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._at_once = at_once

    def run(self, workload: Workload) -> Record:
        """Serve a workload; ModelError, from the scheduler, for a request that never fits."""
        return _Run(self._scheduler, self._clock, self._at_once, workload).record


class _Run:
    """One workload on its way."""

    def __init__(self, scheduler: Scheduler, clock: Clock, at_once: bool, workload: Workload) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._at_once = at_once
        self._think_ns = workload.think_ns
        self._left = deque(workload.queries[workload.users :]) if workload.users else deque[Query]()
        times = [0] * workload.users or workload.arrivals_ns
        self._coming = deque(zip(times, workload.queries))
        self._lives: dict[Request, Life] = {}
        self._last_ns: dict[Request, int] = {}
        self._numbers = 0
        self._zeros = [0] * workload.longest
        self.record = Record()
        self._serve()
        self.record.lives.sort(key=lambda life: life.arrival_ns)

    def _serve(self) -> None:
        now = 0
        while True:
            while self._coming and self._coming[0][0] <= now:
                self._submit(*self._coming.popleft())
            batch = self._scheduler.schedule()
            if not batch.chunks:
                if not self._coming:
                    return
                now = self._coming[0][0]
                continue
            now = self._step(batch, self._clock.step(batch), now)

    def _submit(self, arrival_ns: int, query: Query) -> None:
        # Tokens are numbers that tell prompts apart, so that the scheduler shares pages of equal prefixes only.
        self._numbers += 1
        tokens = [-1 - query.group] * query.shared + [self._numbers] * (query.prompt - query.shared)
        request = Request(str(self._numbers), tokens, query.new, arrival=arrival_ns)
        self._scheduler.submit(request)
        self._lives[request] = Life(query, arrival_ns)

    def _step(self, batch: Batch, time: StepTime, now: int) -> int:
        """Advance by a step, or by several that are alike; returns when they end."""
        for request in batch.chunks.keys() - self._last_ns.keys():
            life = self._lives[request]
            life.started_ns, life.cached_tokens = now, request.shared_tokens
            self._last_ns[request] = _WAITS
        record, scheduler = self.record, self._scheduler
        steps = self._steps(batch, time, now)
        end = now + steps * time.time_ns
        record.steps += steps
        record.tokens += steps * batch.tokens
        record.padding += steps * time.padding
        choosing = [request for request, chunk in batch.chunks.items() if chunk.chooses]
        if steps > 1:
            scheduler.repeat(batch, steps, self._zeros)
        else:
            scheduler.finish(batch, dict.fromkeys(choosing, (0,)))
        record.spans.append(
            Span(
                now,
                end,
                scheduler.cache.count - scheduler.cache.free,
                len(scheduler.running),
                len(scheduler.waiting),
                len(batch.preempted),
            )
        )
        self._note(choosing, steps, time.time_ns, now)
        self._end(choosing, end)
        return end

    def _steps(self, batch: Batch, time: StepTime, now: int) -> int:
        """How many steps are alike, the last of which begins before the next request comes."""
        if not self._at_once or time.alike == 1:
            return 1
        steps = min(time.alike, self._scheduler.steady_steps(batch))
        if steps > 1 and self._coming:
            steps = min(steps, -((now - self._coming[0][0]) // time.time_ns))
        return steps

    def _note(self, choosing: list[Request], steps: int, step_ns: int, now: int) -> None:
        """A token of each request in each step."""
        first = now + step_ns
        for last, count in Counter(map(self._last_ns.__getitem__, choosing)).items():
            if last != _WAITS:
                self.record.gaps_ns[first - last] += count
                continue
            for request in choosing:
                if self._last_ns[request] == _WAITS:
                    self._lives[request].first_token_ns = first
        if steps > 1:
            self.record.gaps_ns[step_ns] += (steps - 1) * len(choosing)
        self._last_ns.update(dict.fromkeys(choosing, now + steps * step_ns))

    def _end(self, choosing: Iterable[Request], now: int) -> None:
        """Requests that have all their tokens leave, and their users send the next ones."""
        for request in choosing:
            if len(request.tokens) > request.most_positions:
                self._scheduler.end(request)
                life = self._lives.pop(request)
                life.end_ns, life.preemptions = now, request.preemptions
                self.record.lives.append(life)
                del self._last_ns[request]
                if self._left:
                    self._coming.append((now + self._think_ns, self._left.popleft()))

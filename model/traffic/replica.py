"""One replica of a service: the engine's scheduler on a clock, with requests whose tokens nobody computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model.engine import Batch, Request, Schedulers
from model.traffic.clock import Clock, StepTime
from model.traffic.drafts import Drafts
from model.traffic.record import WAITS, Life, Record, Span


@dataclass(frozen=True)
class Stepped:
    """A step, or several alike, until `end_ns`: how many requests ended, and those whose pages are to be moved."""

    end_ns: int
    ended: int
    computed: Sequence[tuple[Request, Life]]


class Replica:
    """A scheduler and a clock. `drafts` are proposed where the scheduler has slots for them.

    Requests that are `moving` get no tokens here: their prompts are computed, or their pages are on the way.
    `at_once` advances steps together between which nothing changes; the times are the same without it.
    """

    def __init__(
        self, scheduler: Schedulers, clock: Clock, drafts: Drafts | None = None, at_once: bool = True
    ) -> None:
        self.scheduler = scheduler
        self.record = Record()
        self.moving: set[Request] = set()
        self._clock = clock
        self._drafts = drafts
        self._at_once = at_once and drafts is None
        self._lives: dict[Request, Life] = {}
        self._last_ns: dict[Request, int] = {}

    def submit(self, request: Request, life: Life) -> None:
        """Let a request wait for its turn; ModelError, from the scheduler, for one that never fits."""
        self.scheduler.submit(request)
        self._lives[request] = life

    def adopt(self, request: Request, life: Life) -> bool:
        """Take pages for a request whose prompt is computed elsewhere; False where it has to wait."""
        if not self.scheduler.adopt(request):
            return False
        self._lives[request], self._last_ns[request] = life, life.first_token_ns
        self.moving.add(request)
        return True

    def arrived(self, request: Request, now: int) -> None:
        """The pages of an adopted request are here: it decodes from its first token on."""
        self.moving.discard(request)
        self.scheduler.arrived(request, 0)
        self._lives[request].moved_ns = now

    def gone(self, request: Request) -> None:
        """The pages of a request have been moved elsewhere; those here are free."""
        self.moving.discard(request)
        self.scheduler.end(request)
        self._lives[request].preemptions += request.preemptions
        del self._lives[request], self._last_ns[request]

    def step(self, now: int, until: int | None) -> Stepped | None:
        """Compute a step that begins now, or several alike that begin before `until`; None for nothing to compute."""
        batch = self.scheduler.schedule()
        if not batch.chunks:
            return None
        for request in batch.chunks.keys() - self._last_ns.keys():
            life = self._lives[request]
            life.started_ns, life.cached_tokens = now, request.shared_tokens
            self._last_ns[request] = WAITS
        time = self._time(batch)
        steps = self._steps(batch, time, now, until)
        end = now + steps * time.time_ns
        chosen = self._finish(batch, steps)
        self._count(batch, time, steps, now, end)
        computed = self._note(chosen, steps, time.time_ns, now)
        return Stepped(end, self._end(chosen, end), computed)

    def _time(self, batch: Batch) -> StepTime:
        """The time of a batch, with that of its drafts, which it is given."""
        if self._drafts is None:
            return self._clock.step(batch)
        drafted = self._drafts.propose(batch, self.record.acceptance)
        self.scheduler.drafted(batch)
        time = self._clock.step(batch)
        return StepTime(time.time_ns + drafted.time_ns, time.padding, 1, time.prompts_ns + drafted.prompts_ns)

    def _steps(self, batch: Batch, time: StepTime, now: int, until: int | None) -> int:
        """How many steps are alike."""
        if not self._at_once or self.moving or time.alike == 1:
            return 1
        steps = min(time.alike, self.scheduler.steady_steps(batch))
        if steps > 1 and until is not None:
            steps = min(steps, -((now - until) // time.time_ns))
        return steps

    def _finish(self, batch: Batch, steps: int) -> dict[Request, int]:
        """Give requests their tokens: how many each got in each step."""
        chosen = dict.fromkeys((request for request, chunk in batch.chunks.items() if chunk.samples), 1)
        if self._drafts is not None:
            chosen = {request: 1 + self._drafts.right(request) for request in chosen}
        if steps > 1:
            self.scheduler.repeat(batch, steps, (0,) * steps)
        elif self._drafts is None and not self.moving:
            self.scheduler.finish(batch, dict.fromkeys(chosen, (0,)))
        else:
            tokens = {each: (0,) * count for each, count in chosen.items() if each not in self.moving}
            self.scheduler.finish(batch, tokens)
        return chosen

    def _count(self, batch: Batch, time: StepTime, steps: int, now: int, end: int) -> None:
        record, scheduler = self.record, self.scheduler
        record.steps += steps
        record.tokens += steps * batch.tokens
        record.padding += steps * time.padding
        record.prompts_ns += steps * time.prompts_ns
        pages = scheduler.cache.count - scheduler.cache.free
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        record.spans.append(Span(now, end, pages, running, waiting, len(batch.preempted)))

    def _note(
        self, chosen: Mapping[Request, int], steps: int, step_ns: int, now: int
    ) -> list[tuple[Request, Life]]:
        """The times of the tokens that requests got in each step; returns the requests whose prompts are computed."""
        first, computed, last_ns = now + step_ns, list[tuple[Request, Life]](), self._last_ns
        getting = chosen.keys() - self.moving if self.moving else chosen.keys()
        groups = Counter(map(last_ns.__getitem__, getting))
        begin = groups.pop(WAITS, 0)
        for last, count in groups.items():
            self.record.gaps_ns[first - last] += count
        for request in chosen if begin or self.moving else ():
            if last_ns[request] == WAITS:
                last_ns[request] = self._lives[request].first_token_ns = first
                if request in self.moving:
                    computed.append((request, self._lives[request]))
        if steps > 1:
            self.record.gaps_ns[step_ns] += (steps - 1) * len(chosen)
        if self._drafts is not None:
            together = sum(chosen[request] - 1 for request in getting)
            if together:
                self.record.gaps_ns[0] += together
        last_ns.update(dict.fromkeys(getting, now + steps * step_ns))
        return computed

    def _end(self, chosen: Mapping[Request, int], now: int) -> int:
        """Requests that have all their tokens leave; returns how many."""
        ended = 0
        for request in chosen:
            if len(request.tokens) > request.most_positions:
                self.scheduler.end(request)
                life = self._lives.pop(request)
                life.end_ns, life.preemptions = now, life.preemptions + request.preemptions
                self.record.lives.append(life)
                del self._last_ns[request]
                ended += 1
        return ended

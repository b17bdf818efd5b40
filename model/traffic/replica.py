"""One replica of `nkw traffic`: the engine's scheduler on a predicted clock.

No tokens are computed: every sampled token is 0, and each step takes its predicted time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model.engine import Batch, Request, Schedulers
from model.traffic.clock import Clock, StepTime
from model.traffic.drafts import DraftProposer
from model.traffic.record import NOT_YET, Record, Span, Timeline


@dataclass(frozen=True)
class Advance:
    """Outcome of `Replica.step`: one step, or several equal steps in a row, that end at `end_ns`.

    `ended` counts the requests that have all their tokens. `computed` are the requests whose prompts the step completed
    and whose pages are to be moved to another replica.
    """

    end_ns: int
    ended: int
    computed: Sequence[tuple[Request, Timeline]]


class Replica:
    """A scheduler with the predicted clock of its steps, and the record of its requests and steps.

    Requests in `moving` get no tokens here: their prompts are computed for another replica, or their pages are on the
    way.

    Args:
        scheduler: The engine's scheduler, or one for several data-parallel groups.
        clock: Predicts the time of each step.
        proposer: Gives draft tokens to chunks that have slots for them; None without drafts.
        joins_steps: Whether `step` may advance several equal steps at once. It is faster and changes no time.
    """

    def __init__(
        self,
        scheduler: Schedulers,
        clock: Clock,
        proposer: DraftProposer | None = None,
        joins_steps: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.record = Record()
        self.moving: set[Request] = set()
        self._clock = clock
        self._proposer = proposer
        self._joins_steps = joins_steps and proposer is None
        self._timelines: dict[Request, Timeline] = {}
        self._last_token_ns: dict[Request, int] = {}

    def submit(self, request: Request, timeline: Timeline) -> None:
        """Queue a request, whose times will be written to `timeline`.

        Raises:
            ModelError: If the request never fits into the pages or the steps.
        """
        self.scheduler.submit(request)
        self._timelines[request] = timeline

    def adopt(self, request: Request, timeline: Timeline) -> bool:
        """Take pages for a request whose prompt another replica computed, and add the request to `moving`.

        Returns:
            False, with nothing changed, if the request has to wait because pages are too few or other requests wait.
        """
        if not self.scheduler.adopt(request):
            return False
        self._timelines[request], self._last_token_ns[request] = timeline, timeline.first_token_ns
        self.moving.add(request)
        return True

    def receive_pages(self, request: Request, now: int) -> None:
        """Let an adopted request, whose pages arrived at `now` ns, decode from its second token on."""
        self.moving.discard(request)
        self.scheduler.complete_transfer(request, 0)
        self._timelines[request].moved_ns = now

    def release(self, request: Request) -> None:
        """Free the pages of a request that another replica decodes from now on, and forget the request here."""
        self.moving.discard(request)
        self._remove(request)

    def step(self, now: int, until: int | None) -> Advance | None:
        """Schedule and compute a step that begins at `now` ns, or several equal steps that all begin before `until`.

        Token times, ended requests and steps are added to `record`.

        Args:
            now: Begin of the step in ns.
            until: Time in ns from which another event may change the steps; None for no such event.

        Returns:
            The advance, or None if no request has tokens to compute.
        """
        batch = self.scheduler.schedule()
        if not batch.chunks:
            return None
        for request in batch.chunks.keys() - self._last_token_ns.keys():
            timeline = self._timelines[request]
            timeline.started_ns, timeline.cached_tokens = now, request.shared_tokens
            self._last_token_ns[request] = NOT_YET
        time = self._predict_time(batch)
        steps = self._count_equal_steps(batch, time, now, until)
        end_ns = now + steps * time.time_ns
        new_tokens = self._finish_steps(batch, steps)
        self._record_steps(batch, time, steps, now)
        computed = self._record_tokens(new_tokens, steps, time.time_ns, now)
        ended = [request for request in new_tokens if len(request.tokens) > request.max_positions]
        for request in ended:
            timeline = self._remove(request)
            timeline.end_ns = end_ns
            self.record.timelines.append(timeline)
        return Advance(end_ns, len(ended), computed)

    def _remove(self, request: Request) -> Timeline:
        """Remove a request from the scheduler and return its timeline, to which its preemptions here are added."""
        self.scheduler.end(request)
        del self._last_token_ns[request]
        timeline = self._timelines.pop(request)
        timeline.preemptions += request.preemptions
        return timeline

    def _predict_time(self, batch: Batch) -> StepTime:
        """Return the predicted time of the step that computes `batch`.

        With a proposer the chunks of `batch` first get draft tokens, whose outcome is drawn. The time includes the
        draft model.
        """
        if self._proposer is None:
            return self._clock.step(batch)
        drafts = self._proposer.propose(batch, self.record.acceptance)
        self.scheduler.discard_unused_slots(batch)
        time = self._clock.step(batch)
        return StepTime(time.time_ns + drafts.time_ns, time.padding, 1, time.prompts_ns + drafts.prompts_ns)

    def _count_equal_steps(self, batch: Batch, time: StepTime, now: int, until: int | None) -> int:
        """Return how many steps in a row, from this step on, schedule the same requests and take the same time.

        It is 1 with a proposer, while requests move, and in a step that computes prompts. All steps begin before
        `until`.
        """
        if not self._joins_steps or self.moving or time.equal_steps == 1:
            return 1
        steps = min(time.equal_steps, self.scheduler.count_steady_steps(batch))
        if steps > 1 and until is not None:
            steps = min(steps, -((now - until) // time.time_ns))
        return steps

    def _finish_steps(self, batch: Batch, steps: int) -> dict[Request, int]:
        """Complete `steps` equal steps in the scheduler, which appends token 0 for each new token of a request.

        Returns:
            The number of new tokens of each sampling request in each step: 1, and its accepted drafts.
        """
        new_tokens = dict.fromkeys((request for request, chunk in batch.chunks.items() if chunk.samples), 1)
        if self._proposer is not None:
            new_tokens = {request: 1 + self._proposer.count_accepted(request) for request in new_tokens}
        if steps > 1:
            self.scheduler.repeat(batch, steps, (0,) * steps)
        else:
            staying = {
                request: (0,) * count for request, count in new_tokens.items() if request not in self.moving
            }
            self.scheduler.complete_step(batch, staying)
        return new_tokens

    def _record_steps(self, batch: Batch, time: StepTime, steps: int, now: int) -> None:
        """Add `steps` equal steps that begin at `now` ns to the record, as one span."""
        record, scheduler = self.record, self.scheduler
        record.steps += steps
        record.tokens += steps * batch.tokens
        record.padding += steps * time.padding
        record.prompts_ns += steps * time.prompts_ns
        pages = scheduler.cache.count - scheduler.cache.free
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        end_ns = now + steps * time.time_ns
        record.spans.append(Span(now, end_ns, pages, running, waiting, len(batch.preempted)))

    def _record_tokens(
        self, new_tokens: Mapping[Request, int], steps: int, step_ns: int, now: int
    ) -> list[tuple[Request, Timeline]]:
        """Record the times of first tokens and the gaps between tokens of `steps` equal steps that begin at `now` ns.

        Args:
            new_tokens: Number of new tokens of each request in each step.
            steps: Number of steps.
            step_ns: Time of one step.
            now: Begin of the first step.

        Returns:
            The requests whose prompts are now computed and whose pages are to be moved to another replica.
        """
        token_ns, last_token_ns = now + step_ns, self._last_token_ns
        computed: list[tuple[Request, Timeline]] = []
        decoding = new_tokens.keys() - self.moving if self.moving else new_tokens.keys()
        last_times = Counter(map(last_token_ns.__getitem__, decoding))
        first_tokens = last_times.pop(NOT_YET, 0)
        for last_ns, count in last_times.items():
            self.record.gaps_ns[token_ns - last_ns] += count
        for request in new_tokens if first_tokens or self.moving else ():
            if last_token_ns[request] == NOT_YET:
                last_token_ns[request] = self._timelines[request].first_token_ns = token_ns
                if request in self.moving:
                    computed.append((request, self._timelines[request]))
        if steps > 1:
            self.record.gaps_ns[step_ns] += (steps - 1) * len(new_tokens)
        accepted = sum(new_tokens.values()) - len(new_tokens)
        if accepted:
            self.record.gaps_ns[0] += accepted
        last_token_ns.update(dict.fromkeys(decoding, now + steps * step_ns))
        return computed

"""The search for the request at fault after a model's step has raised.

All requests are preempted: they release their pages and slots, keep their tokens and random numbers, and compute their
states again. The requests of the failed step then run in two halves, one after the other. A half runs until its
requests have computed the tokens of the failed step. A half that fails is divided again, until one request fails alone.
Other requests and new ones wait meanwhile.

If both halves succeed and their union fails again, no single request is at fault. After the second time each half runs
to its end, so that all of these requests end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from model.engine.groups import Schedulers
from model.engine.request import Request
from model.engine.scheduler import Batch

MOST_UNEXPLAINED = 2
"""Number of failed steps without a request at fault after which the halves of a set run to their ends."""


@dataclass(eq=False)
class Suspect:
    """Prompt that may be at fault, with all its continuations, which run together.

    `unexplained` counts failed steps with the prompt in which no single prompt was at fault.
    """

    unexplained: int = field(default=0, init=False)


class Suspected(Protocol):
    """Continuation of a prompt that may be at fault."""

    @property
    def suspect(self) -> Suspect:
        """Prompt that is continued."""


class Isolation:
    """Search for the request at fault: sets of requests that run one after the other.

    Attributes:
        faults: Number of requests at fault that the current search has found.
        succeeded: Whether a step has succeeded since the search began.
    """

    def __init__(self, scheduler: Schedulers, live: Mapping[Request, Suspected]) -> None:
        self._scheduler = scheduler
        self._live = live
        self._trials: list[Sequence[Suspect]] = []
        self._targets: dict[Request, int] = {}
        self._withdrawn: dict[Request, None] = {}
        self._all: Sequence[Suspect] = ()
        self._runs_to_the_end = False
        self._changed = False
        self.faults = 0
        self.succeeded = False

    @property
    def is_active(self) -> bool:
        """Whether any set of requests still runs or waits to run."""
        return bool(self._trials)

    def hold_back(self, request: Request) -> None:
        """Let a new request wait until the search ends; do nothing if no search is active."""
        if self._trials or self._changed:
            self._withdraw([request])

    def divide(self, batch: Batch) -> Suspect | None:
        """Withdraw all requests after a failed step, and divide the prompts of the step into two halves to run next.

        Args:
            batch: The batch of the failed step.

        Returns:
            The prompt at fault, if it was alone in the step; None if halves will run.
        """
        suspects = list(dict.fromkeys(self._live[request].suspect for request in batch.chunks))
        if self._trials:
            remaining = [suspect for suspect in self._trials.pop() if suspect not in suspects]
            self._trials += [remaining] if remaining else []
        else:
            self._all, self.faults, self.succeeded = suspects, 0, False
            doubtful = [suspect for suspect in suspects if suspect.unexplained >= MOST_UNEXPLAINED]
            self._runs_to_the_end = len(doubtful) > 1
        for request, chunk in batch.chunks.items():
            end = chunk.seq_len - len(chunk.drafts)
            self._targets[request] = max(end, self._targets.get(request, 0))
        self._changed = True
        self._withdraw(self._live)
        if len(suspects) == 1:
            self.faults += 1
            return suspects[0]
        middle = len(suspects) // 2
        self._trials += [suspects[middle:], suspects[:middle]]
        return None

    def note_success(self, batch: Batch) -> None:
        """Record that a step succeeded, and which requests have reached the tokens that they had in the failed step."""
        self.succeeded = True
        for request in batch.chunks if self._targets else ():
            if request.computed >= self._targets.get(request, 0):
                self._targets.pop(request, None)

    def advance(self) -> None:
        """Let the next set of requests run if the running set has passed, and withdraw all others.

        After the last set, lets all requests run and ends the search. Call it before each step is scheduled; without a
        search it does nothing.
        """
        while self._trials and self._has_passed(self._trials[-1]):
            self._trials.pop()
            self._changed = True
        if not self._changed:
            return
        self._changed = False
        if self._trials:
            trial = self._trials[-1]
            self._withdraw(self._live)
            self._resume(request for request, owner in self._live.items() if owner.suspect in trial)
            return
        self._resume(self._live)
        self._withdrawn.clear()
        self._targets.clear()
        if not self.faults:
            for suspect in self._all:
                suspect.unexplained += 1
        self._all = ()

    def _has_passed(self, trial: Sequence[Suspect]) -> bool:
        """Return whether the requests of a set have computed the tokens of the failed step, or have ended.

        If sets run to their ends, returns whether all of the requests have ended.
        """
        running = [request for request, owner in self._live.items() if owner.suspect in trial]
        return (
            not running if self._runs_to_the_end else not any(request in self._targets for request in running)
        )

    def _withdraw(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request not in self._withdrawn:
                request.preemptions += request.is_running
                self._scheduler.end(request)
                self._withdrawn[request] = None

    def _resume(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self._withdrawn:
                del self._withdrawn[request]
                self._scheduler.resume(request)

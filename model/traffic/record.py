"""Records of a run: the timeline of each request, and the steps of each replica."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from model.engine.speculation import Acceptance
from model.traffic.workload import Query

NOT_YET = -1
"""Time of an event that has not happened."""


@dataclass(eq=False)
class Timeline:
    """Times of one request in ns since the start of the run; `NOT_YET` for an event that has not happened.

    `started_ns` is the start of its first step, and `end_ns` the time of its last token. `cached_tokens` of the prompt
    were in the prefix cache when the request first started. If another replica decodes the request, its pages arrived
    there at `moved_ns`.
    """

    query: Query
    arrival_ns: int
    started_ns: int = NOT_YET
    first_token_ns: int = NOT_YET
    moved_ns: int = NOT_YET
    end_ns: int = NOT_YET
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_ns(self) -> int:
        """Time from arrival to the start of the first step."""
        return self.started_ns - self.arrival_ns

    @property
    def ttft_ns(self) -> int:
        """Time to first token: from arrival to the first token."""
        return self.first_token_ns - self.arrival_ns

    @property
    def handover_ns(self) -> int:
        """Time from the first token to the arrival of the pages at the decoding replica; 0 without a handover."""
        return 0 if self.moved_ns == NOT_YET else self.moved_ns - self.first_token_ns

    @property
    def mean_itl_ns(self) -> float:
        """Mean time between neighbouring tokens of the request; 0 for a single token."""
        return (self.end_ns - self.first_token_ns) / max(1, self.query.new_tokens - 1)

    @property
    def e2e_ns(self) -> int:
        """End-to-end time: from arrival to the last token."""
        return self.end_ns - self.arrival_ns


@dataclass(frozen=True)
class Span:
    """Steps in a row that one replica computes with equal times and the same requests, from `begin_ns` to `end_ns`.

    `pages` is the number of pages in use after the steps. `running` and `waiting` are numbers of requests. `preempted`
    counts the requests that lost their pages when the steps were scheduled.
    """

    begin_ns: int
    end_ns: int
    pages: int
    running: int
    waiting: int
    preempted: int


@dataclass
class Record:
    """Events of one replica in one run: the timelines of requests that ended there, and a span for its steps.

    `gaps_ns` has the number of pairs of neighbouring tokens of a request by the time between them; tokens of one step
    have a gap of 0. `tokens` counts the tokens that steps computed for requests, and `padding` those for no request.
    Chunks of prompts take `prompts_ns` of the steps' time.
    """

    timelines: list[Timeline] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    gaps_ns: Counter[int] = field(default_factory=Counter)
    acceptance: Acceptance = field(default_factory=Acceptance)
    steps: int = 0
    tokens: int = 0
    padding: int = 0
    prompts_ns: int = 0

    @property
    def busy_ns(self) -> int:
        """Time of all steps in ns."""
        return sum(span.end_ns - span.begin_ns for span in self.spans)

    @property
    def end_ns(self) -> int:
        """End of the last step in ns since the start of the run, or 0 without a step."""
        return self.spans[-1].end_ns if self.spans else 0

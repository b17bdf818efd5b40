"""What happened in a run: the life of each request, and the steps of each replica."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from model.engine.speculation import Acceptance
from model.traffic.workload import Query

WAITS = -1
"""The time of what has not happened yet."""


@dataclass(eq=False)
class Life:
    """The times of a request in nanoseconds: it came, its first step began, its first and its last token were there.

    `cached_tokens` of the prompt were there when it first started. Where another replica decodes, its pages were
    there at `moved_ns`.
    """

    query: Query
    arrival_ns: int
    started_ns: int = WAITS
    first_token_ns: int = WAITS
    moved_ns: int = WAITS
    end_ns: int = WAITS
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
    def handover_ns(self) -> int:
        """From its first token to the moment when its pages are where it is decoded; 0 where they stay."""
        return 0 if self.moved_ns == WAITS else self.moved_ns - self.first_token_ns

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
    """What happened on one replica: requests that ended there, by arrival, and every step.

    `gaps_ns` are the times between neighbouring tokens of a request, with how often each occurred; tokens of one step
    come together. `prompts_ns` is the part of the steps' time that chunks of prompts take.
    """

    lives: list[Life] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    gaps_ns: Counter[int] = field(default_factory=Counter)
    acceptance: Acceptance = field(default_factory=Acceptance)
    steps: int = 0
    tokens: int = 0
    padding: int = 0
    prompts_ns: int = 0

    @property
    def busy_ns(self) -> int:
        """The time of all steps."""
        return sum(span.end_ns - span.begin_ns for span in self.spans)

    @property
    def end_ns(self) -> int:
        """The end of the last step; a run begins at 0."""
        return self.spans[-1].end_ns if self.spans else 0

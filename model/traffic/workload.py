"""A workload: the requests of a run, when each comes, and how long it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.errors import ModelError
from model.traffic.lengths import LONGEST, Lengths

SECOND_NS = 1_000_000_000

LARGEST = 1_000_000
"""Requests of a run."""


@dataclass(frozen=True)
class Query:
    """The tokens of a prompt, those of its front that its whole `group` shares, and the new tokens that follow it."""

    prompt: int
    new: int
    shared: int = 0
    group: int = 0

    @property
    def positions(self) -> int:
        """Prompt and new tokens."""
        return self.prompt + self.new


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they come.

    They come at `arrivals_ns`; or, where there are `users`, each user sends the next one `think_ns` after the answer to
    the one before. `left_out` could not be served: rows of a trace without tokens, and requests that are too long.
    """

    queries: tuple[Query, ...]
    arrivals_ns: tuple[int, ...] = ()
    users: int = 0
    think_ns: int = 0
    left_out: int = 0

    def __post_init__(self) -> None:
        assert bool(self.users) != bool(self.arrivals_ns), "users send requests, or requests have times"

    @property
    def longest(self) -> int:
        """Positions of the longest request."""
        return max(query.positions for query in self.queries)

    @property
    def mean(self) -> int:
        """Positions of a request on average, rounded up."""
        return -(-sum(query.positions for query in self.queries) // len(self.queries))

    @property
    def rate(self) -> float | None:
        """Requests per second; None where users decide it, and for requests that come at one moment."""
        if not self.arrivals_ns or self.arrivals_ns[-1] == self.arrivals_ns[0]:
            return None
        return (len(self.queries) - 1) * SECOND_NS / (self.arrivals_ns[-1] - self.arrivals_ns[0])

    def at_rate(self, rate: float) -> Workload:
        """The same requests, their times stretched to another rate; ModelError for requests of one moment."""
        if self.rate is None:
            raise ModelError("requests that come at one moment have no rate; give a trace of several moments")
        first, stretch = self.arrivals_ns[0], self.rate / rate
        return replace(self, arrivals_ns=tuple(int((each - first) * stretch) for each in self.arrivals_ns))

    def of_replica(self, replica: int, replicas: int) -> Workload | None:
        """What one of several replicas gets, each in turn; None for nothing."""
        queries = self.queries[replica::replicas]
        users = len(range(replica, self.users, replicas))
        if not queries or (self.users and not users):
            return None
        return replace(
            self, queries=queries, arrivals_ns=self.arrivals_ns[replica::replicas], users=users, left_out=0
        )

    def first(self, count: int) -> Workload:
        """The first requests."""
        return replace(self, queries=self.queries[:count], arrivals_ns=self.arrivals_ns[:count])

    def within(self, positions: int) -> Workload:
        """Without the requests of more positions; ModelError where none is left."""
        kept = [number for number, query in enumerate(self.queries) if query.positions <= positions]
        if not kept:
            raise ModelError(
                f"no request fits into the {positions:,} tokens that the model takes; the shortest has "
                f"{min(query.positions for query in self.queries):,}"
            )
        return replace(
            self,
            queries=tuple(self.queries[number] for number in kept),
            arrivals_ns=tuple(self.arrivals_ns[number] for number in kept if self.arrivals_ns),
            left_out=self.left_out + len(self.queries) - len(kept),
        )


@dataclass(frozen=True)
class SharedPrefix:
    """Tokens that stand before every prompt; of `groups` of requests each has its own."""

    tokens: int
    groups: int = 1

    @classmethod
    def parsed(cls, text: str) -> SharedPrefix:
        """The prefix that a text such as 1024 or 1024:8 names; ModelError for another text."""
        match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
        tokens, groups = (int(each or 1) for each in match.groups()) if match else (0, 0)
        if not 0 < tokens <= LONGEST or not groups:
            raise ModelError(
                f"shared prefix {text!r:.60}; write 1024, or 1024:8 for 8 groups, of 1 to {LONGEST:,} tokens"
            )
        return cls(tokens, groups)


def drawn(
    count: int, prompts: Lengths, news: Lengths, prefix: SharedPrefix | None, draw: np.random.Generator
) -> tuple[Query, ...]:
    """Requests whose lengths are drawn."""
    own, new = prompts.draw(count, draw), news.draw(count, draw)
    if prefix is None:
        return tuple(Query(*each) for each in zip(own, new))
    groups = draw.integers(prefix.groups, size=count).tolist()
    return tuple(
        Query(prefix.tokens + prompt, more, prefix.tokens, group)
        for prompt, more, group in zip(own, new, groups)
    )


def poisson(queries: Sequence[Query], rate: float, draw: np.random.Generator) -> Workload:
    """Requests that come independently of one another, `rate` of them per second on average."""
    times = np.cumsum(draw.exponential(SECOND_NS / rate, size=len(queries)))
    return Workload(tuple(queries), tuple(int(each) for each in times))

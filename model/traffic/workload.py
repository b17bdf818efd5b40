"""A workload: the requests of a run of `nkw traffic`, as lengths of prompts and outputs, and when they arrive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from model.errors import ModelError
from model.traffic.lengths import LONGEST, Lengths

SECOND_NS = 1_000_000_000

MOST_REQUESTS = 1_000_000
"""Requests, or users, of the largest run."""

Q = TypeVar("Q")
S = TypeVar("S", bound="RequestStream[Any]")


@dataclass(frozen=True)
class Query:
    """Lengths of one request in tokens: its prompt and its output.

    The first `shared_tokens` of the prompt equal those of all requests of the same `group`.
    """

    prompt_tokens: int
    new_tokens: int
    shared_tokens: int = 0
    group: int = 0

    @property
    def positions(self) -> int:
        """Number of prompt and new tokens together."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class RequestStream(Generic[Q]):
    """Requests of a run, in the order of their arrival; `queries` has what each of them asks for.

    Either `arrivals_ns` has the arrival time of each request in ns, or it is empty and `users` is not 0. Each user then
    sends a request `think_ns` after the answer to the previous one. `left_out` counts requests that were dropped
    because they cannot be served: rows of a trace without tokens, and requests that are too long.
    """

    queries: tuple[Q, ...]
    arrivals_ns: tuple[int, ...] = ()
    users: int = 0
    think_ns: int = 0
    left_out: int = 0

    def __post_init__(self) -> None:
        assert bool(self.users) != bool(self.arrivals_ns), "users send requests, or requests have times"

    @property
    def rate(self) -> float | None:
        """Requests per second between the first and the last arrival.

        None if users decide the rate, or if all requests arrive at one moment.
        """
        if not self.arrivals_ns or self.arrivals_ns[-1] == self.arrivals_ns[0]:
            return None
        return (len(self.queries) - 1) * SECOND_NS / (self.arrivals_ns[-1] - self.arrivals_ns[0])

    def stretch_to_rate(self: S, rate: float) -> S:
        """Return the same requests with arrival times that start at 0 and are scaled to `rate` requests per second.

        Raises:
            ModelError: If users decide the rate, or if all requests arrive at one moment.
        """
        if self.rate is None:
            raise ModelError("requests that come at one moment have no rate; give a trace of several moments")
        first_ns, factor = self.arrivals_ns[0], self.rate / rate
        return replace(
            self, arrivals_ns=tuple(int((arrival_ns - first_ns) * factor) for arrival_ns in self.arrivals_ns)
        )

    def select_share(self: S, replica: int, replicas: int) -> S | None:
        """Return the requests that go to one replica: every `replicas`-th request and user, from index `replica` on.

        If there are fewer users than replicas, only as many replicas as users get requests.

        Returns:
            The stream of the replica, or None if no request or no user goes to it.
        """
        if self.users:
            replicas = min(replicas, self.users)
        queries = () if replica >= replicas else self.queries[replica::replicas]
        if not queries:
            return None
        users = len(range(replica, self.users, replicas))
        return replace(
            self, queries=queries, arrivals_ns=self.arrivals_ns[replica::replicas], users=users, left_out=0
        )


@dataclass(frozen=True)
class Workload(RequestStream[Query]):
    """Requests with prompts and outputs in tokens."""

    @property
    def longest(self) -> int:
        """Number of prompt and new tokens of the longest request."""
        return max(query.positions for query in self.queries)

    @property
    def mean(self) -> int:
        """Mean number of prompt and new tokens of a request, rounded up."""
        return -(-sum(query.positions for query in self.queries) // len(self.queries))

    def drop_longer_than(self, max_positions: int) -> Workload:
        """Return the workload without the requests of more than `max_positions` positions.

        Raises:
            ModelError: If every request is longer.
        """
        kept = [index for index, query in enumerate(self.queries) if query.positions <= max_positions]
        if not kept:
            raise ModelError(
                f"no request fits into the {max_positions:,} tokens that the model takes; the shortest has "
                f"{min(query.positions for query in self.queries):,}"
            )
        return replace(
            self,
            queries=tuple(self.queries[index] for index in kept),
            arrivals_ns=tuple(self.arrivals_ns[index] for index in kept if self.arrivals_ns),
            left_out=self.left_out + len(self.queries) - len(kept),
        )


@dataclass(frozen=True)
class SharedPrefix:
    """Prefix of `tokens` tokens that every prompt has.

    Every request belongs to one of `groups` groups, and each group has different tokens.
    """

    tokens: int
    groups: int = 1

    @classmethod
    def parse(cls, text: str) -> SharedPrefix:
        """Read the text of an option: 1024 is a prefix of all requests, 1024:8 has one prefix for each of 8 groups.

        Raises:
            ModelError: If the text has another form, the tokens are not from 1 to 2^20, or there are 0 groups.
        """
        match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
        tokens, groups = (int(number or 1) for number in match.groups()) if match else (0, 0)
        if not 0 < tokens <= LONGEST or not groups:
            raise ModelError(
                f"shared prefix {text!r:.60}; write 1024, or 1024:8 for 8 groups, of 1 to {LONGEST:,} tokens"
            )
        return cls(tokens, groups)


def draw_queries(
    count: int,
    prompts: Lengths,
    outputs: Lengths,
    prefix: SharedPrefix | None,
    generator: np.random.Generator,
) -> tuple[Query, ...]:
    """Draw `count` requests: lengths of prompts and outputs and, with a shared prefix, the group of each request.

    A shared prefix comes before the drawn prompt length, so a prompt has the tokens of both.
    """
    lengths = list(zip(prompts.draw(count, generator), outputs.draw(count, generator)))
    if prefix is None:
        return tuple(Query(prompt, new) for prompt, new in lengths)
    groups = generator.integers(prefix.groups, size=count).tolist()
    return tuple(
        Query(prefix.tokens + prompt, new, prefix.tokens, group)
        for (prompt, new), group in zip(lengths, groups)
    )


def draw_poisson_arrivals(queries: Sequence[Query], rate: float, generator: np.random.Generator) -> Workload:
    """Return a workload whose requests arrive as a Poisson process of `rate` requests per second."""
    return Workload(tuple(queries), draw_poisson_times(len(queries), rate, generator))


def draw_poisson_times(count: int, rate: float, generator: np.random.Generator) -> tuple[int, ...]:
    """Return `count` arrival times in ns of a Poisson process of `rate` requests per second."""
    times_ns = np.cumsum(generator.exponential(SECOND_NS / rate, size=count))
    return tuple(times_ns.astype(int).tolist())

"""Arrivals of requests, and a workload served on one replica, whose requests become engine requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic

from model.engine import Request
from model.traffic.record import Record, Timeline
from model.traffic.replica import Replica
from model.traffic.workload import Q, Query, RequestStream, Workload


@dataclass(frozen=True)
class Arrival(Generic[Q]):
    """Request that has arrived: its index in the stream, what it asks for, and its arrival time in ns."""

    index: int
    query: Q
    arrival_ns: int


class Arrivals(Generic[Q]):
    """Queue of a stream's requests, ordered by arrival time.

    With arrival times every request is scheduled from the start. With users, each user's first request arrives at 0,
    and `schedule_next` schedules the further ones.
    """

    def __init__(self, stream: RequestStream[Q]) -> None:
        requests = list(enumerate(stream.queries))
        times_ns = [0] * stream.users or stream.arrivals_ns
        self._think_ns = stream.think_ns
        self._scheduled = [(time_ns, *request) for time_ns, request in zip(times_ns, requests)]
        self._unsent = deque(requests[len(times_ns) :])

    @property
    def next_arrival_ns(self) -> int | None:
        """Arrival time of the earliest scheduled request in ns, or None if no arrival is scheduled."""
        return self._scheduled[0][0] if self._scheduled else None

    @property
    def has_unsent(self) -> bool:
        """Whether some requests of users have no arrival time yet, because they follow an answer."""
        return bool(self._unsent)

    def pop_arrived(self, now: int) -> Iterator[Arrival[Q]]:
        """Remove the requests that arrived at `now` ns or before, and yield them in the order of their arrival."""
        while self._scheduled and self._scheduled[0][0] <= now:
            arrival_ns, index, query = heappop(self._scheduled)
            yield Arrival(index, query, arrival_ns)

    def schedule_next(self, answers: int, now: int) -> None:
        """Schedule the next `answers` unsent requests at `now` plus the users' pause; fewer if fewer are left.

        Args:
            answers: Number of users whose last request has ended at `now`.
            now: Time in ns.
        """
        for _ in range(min(answers, len(self._unsent))):
            heappush(self._scheduled, (now + self._think_ns, *self._unsent.popleft()))


def build_request(arrival: Arrival[Query]) -> tuple[Request, Timeline]:
    """Return an engine request with the lengths of a query and made-up token ids, and its new timeline.

    Requests of one group share the ids of their shared prefix. All other ids of a prompt differ from those of every
    other request. So the prefix cache shares exactly the pages of shared prefixes.

    Args:
        arrival: The request with its lengths; its id is its index plus 1.
    """
    query, number = arrival.query, arrival.index + 1
    unshared_tokens = query.prompt_tokens - query.shared_tokens
    tokens = [-1 - query.group] * query.shared_tokens + [number] * unshared_tokens
    request = Request(str(number), tokens, query.new_tokens, arrival=arrival.arrival_ns)
    return request, Timeline(query, arrival.arrival_ns)


def serve(replica: Replica, workload: Workload) -> Record:
    """Serve a workload on one replica until its last request has ended, and return the replica's record.

    Timelines of the record are sorted by arrival time.

    Raises:
        ModelError: If a request never fits into the replica's pages or steps.
    """
    arrivals, now = Arrivals(workload), 0
    while True:
        for arrival in arrivals.pop_arrived(now):
            replica.submit(*build_request(arrival))
        advance = replica.step(now, arrivals.next_arrival_ns)
        if advance is not None:
            now = advance.end_ns
            arrivals.schedule_next(advance.ended, now)
        elif arrivals.next_arrival_ns is None:
            break
        else:
            now = arrivals.next_arrival_ns
    replica.record.timelines.sort(key=lambda timeline: timeline.arrival_ns)
    return replica.record

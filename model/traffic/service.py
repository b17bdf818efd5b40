"""Serves a workload on one replica, and turns its requests into engine requests as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from model.engine import Request
from model.traffic.record import Record, Timeline
from model.traffic.replica import Replica
from model.traffic.workload import Query, Workload


class Arrivals:
    """Queue of a workload's requests, ordered by arrival time.

    With arrival times every request is scheduled from the start. With users, each user's first request arrives at 0,
    and `schedule_next` schedules the further ones.
    """

    def __init__(self, workload: Workload) -> None:
        requests = list(enumerate(workload.queries))
        times_ns = [0] * workload.users or workload.arrivals_ns
        self._think_ns = workload.think_ns
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

    def pop_arrived(self, now: int) -> Iterator[tuple[Request, Timeline]]:
        """Remove the requests that arrived at `now` ns or before, and yield (engine request, new timeline) for each."""
        while self._scheduled and self._scheduled[0][0] <= now:
            arrival_ns, index, query = heappop(self._scheduled)
            yield build_request(query, index, arrival_ns), Timeline(query, arrival_ns)

    def schedule_next(self, answers: int, now: int) -> None:
        """Schedule the next `answers` unsent requests at `now` plus the users' pause; fewer if fewer are left.

        Args:
            answers: Number of users whose last request has ended at `now`.
            now: Time in ns.
        """
        for _ in range(min(answers, len(self._unsent))):
            heappush(self._scheduled, (now + self._think_ns, *self._unsent.popleft()))


def build_request(query: Query, index: int, arrival_ns: int) -> Request:
    """Return an engine request with the lengths of a query and made-up token ids.

    Requests of one group share the ids of their shared prefix. All other ids of a prompt differ from those of every
    other request. So the prefix cache shares exactly the pages of shared prefixes.

    Args:
        query: Lengths of the request.
        index: Index of the request in its workload; its id is the index plus 1.
        arrival_ns: Arrival time.
    """
    unshared_tokens = query.prompt_tokens - query.shared_tokens
    tokens = [-1 - query.group] * query.shared_tokens + [index + 1] * unshared_tokens
    return Request(str(index + 1), tokens, query.new_tokens, arrival=arrival_ns)


def serve(replica: Replica, workload: Workload) -> Record:
    """Serve a workload on one replica until its last request has ended, and return the replica's record.

    Timelines of the record are sorted by arrival time.

    Raises:
        ModelError: If a request never fits into the replica's pages or steps.
    """
    arrivals, now = Arrivals(workload), 0
    while True:
        for request, timeline in arrivals.pop_arrived(now):
            replica.submit(request, timeline)
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

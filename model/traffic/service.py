"""A workload on replicas: each request is served by one of them alone, or one computes its prompt and one decodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from model.engine import Request
from model.traffic.record import Life, Record
from model.traffic.replica import Replica
from model.traffic.workload import Query, Workload


class Arrivals:
    """The requests of a workload as they come."""

    def __init__(self, workload: Workload) -> None:
        times = [0] * workload.users or workload.arrivals_ns
        self._think_ns = workload.think_ns
        self._coming = [
            (time, number, query) for number, (time, query) in enumerate(zip(times, workload.queries))
        ]
        self._left = (
            deque(enumerate(workload.queries[workload.users :], workload.users))
            if workload.users
            else deque()
        )

    @property
    def next_ns(self) -> int | None:
        """When the next one comes, as far as that is known."""
        return self._coming[0][0] if self._coming else None

    @property
    def depends_on_answers(self) -> bool:
        """Whether users have requests left, which they send after an answer."""
        return bool(self._left)

    def until(self, now: int) -> Iterator[tuple[Request, Life]]:
        """Those that have come."""
        while self._coming and self._coming[0][0] <= now:
            arrival_ns, number, query = heappop(self._coming)
            yield request_of(query, number, arrival_ns), Life(query, arrival_ns)

    def answered(self, count: int, now: int) -> None:
        """So many users have their answers, and send their next requests."""
        for _ in range(min(count, len(self._left))):
            number, query = self._left.popleft()
            heappush(self._coming, (now + self._think_ns, number, query))


def request_of(query: Query, number: int, arrival_ns: int) -> Request:
    """A request whose tokens tell prompts apart, so that the scheduler shares pages of equal prefixes only."""
    tokens = [-1 - query.group] * query.shared + [number + 1] * (query.prompt - query.shared)
    return Request(str(number + 1), tokens, query.new, arrival=arrival_ns)


class Service:
    """One replica; `run` serves a workload until its last request has ended."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def run(self, workload: Workload) -> Record:
        """Serve a workload; ModelError, from the scheduler, for a request that never fits."""
        arrivals, replica, now = Arrivals(workload), self._replica, 0
        while True:
            for request, life in arrivals.until(now):
                replica.submit(request, life)
            stepped = replica.step(now, arrivals.next_ns)
            if stepped is not None:
                now = stepped.end_ns
                arrivals.answered(stepped.ended, now)
            elif arrivals.next_ns is None:
                break
            else:
                now = arrivals.next_ns
        replica.record.lives.sort(key=lambda life: life.arrival_ns)
        return replica.record

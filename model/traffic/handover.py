"""Prompts and decoding on separate replicas (disaggregated prefill): the pages of a prompt move from one to the other.

A prefill replica keeps the pages of a prompt until a decoding replica has pages for it and the copy is done. Requests
are handed over in the order in which their prompts are computed. Each goes to the decoding replica with the fewest
requests among those between two steps. A transfer has the links of both replicas to itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from model.engine import Request
from model.traffic.record import Life, Record
from model.traffic.replica import Replica
from model.traffic.service import Arrivals
from model.traffic.workload import Workload

TransferTime = Callable[[Sequence[int]], int]
"""The time in nanoseconds in which so many pages of each kind move from one replica to another."""


@dataclass(frozen=True)
class Transfer:
    """The pages of one request on their way from one replica to another, each by its number among all of them."""

    begin_ns: int
    end_ns: int
    pages: int
    source: int
    target: int


@dataclass(frozen=True)
class _Moving:
    """A request whose pages move: as the replica knows it that sends them, and as the one that receives them does."""

    source: Replica
    sent: Request
    target: Replica
    received: Request


class SeparateService:
    """Replicas that compute prompts, replicas that decode, and the links between them. `transfers` are all of a run."""

    def __init__(
        self, prompts: Sequence[Replica], decoding: Sequence[Replica], transfer_ns: TransferTime
    ) -> None:
        self._prompts, self._decoding = prompts, decoding
        self._transfer_ns = transfer_ns
        self._turn = 0
        self._computed: list[tuple[int, int, Replica, Request, Life]] = []
        self._waiting = deque[tuple[Replica, Request, Life]]()
        self._moving: list[tuple[int, int, _Moving]] = []
        self._step_ends = dict.fromkeys([*prompts, *decoding], 0)
        self._links_free = dict.fromkeys([*prompts, *decoding], 0)
        self._numbers = 0
        self.transfers: list[Transfer] = []

    def run(self, workload: Workload) -> list[Record]:
        """Serve a workload until its last request has ended; ModelError for a request that never fits.

        The records are those of the replicas that compute prompts, then those of the others.
        """
        arrivals, now = Arrivals(workload), 0
        while True:
            for request, life in arrivals.until(now):
                self._submit(request, life)
            self._end_transfers(now)
            self._hand_over(now)
            for replica in self._step_ends:
                if self._step_ends[replica] <= now:
                    self._step(replica, now, arrivals)
            coming = [each for each in (*self._events(now), arrivals.next_ns) if each is not None]
            if not coming:
                break
            now = min(coming)
        records = [replica.record for replica in self._step_ends]
        for record in records:
            record.lives.sort(key=lambda life: life.arrival_ns)
        return records

    def _events(self, now: int) -> Iterable[int]:
        """The times to come at which steps end, prompts are there, and pages have moved."""
        yield from (end for end in self._step_ends.values() if end > now)
        yield from (each[0][0] for each in (self._computed, self._moving) if each)

    def _submit(self, request: Request, life: Life) -> None:
        replica = self._prompts[self._turn % len(self._prompts)]
        self._turn += 1
        if life.query.new > 1:
            replica.moving.add(request)
        replica.submit(request, life)

    def _step(self, replica: Replica, now: int, arrivals: Arrivals) -> None:
        stepped = replica.step(now, self._until(replica, now, arrivals))
        if stepped is None:
            return
        self._step_ends[replica] = stepped.end_ns
        arrivals.answered(stepped.ended, stepped.end_ns)
        for request, life in stepped.computed:
            self._numbers += 1
            heappush(self._computed, (stepped.end_ns, self._numbers, replica, request, life))

    def _until(self, replica: Replica, now: int, arrivals: Arrivals) -> int | None:
        """The first moment at which something else may concern a replica; None for never."""
        # Another replica may be the next to give an answer; one that admits what waits here makes room for a handover.
        if (arrivals.depends_on_answers and len(self._step_ends) > 2) or (
            self._waiting and replica.scheduler.waiting
        ):
            return now + 1
        ends = (end for other, end in self._step_ends.items() if other in self._prompts and end > now)
        others = (each[0][0] for each in (self._computed, self._moving) if each)
        coming = [*ends, *others, *(() if arrivals.next_ns is None else (arrivals.next_ns,))]
        return min(coming, default=None)

    def _end_transfers(self, now: int) -> None:
        while self._moving and self._moving[0][0] <= now:
            end_ns, _, done = heappop(self._moving)
            done.source.gone(done.sent)
            done.target.arrived(done.received, end_ns)

    def _hand_over(self, now: int) -> None:
        """Begin the transfers for which there is room."""
        while self._computed and self._computed[0][0] <= now:
            self._waiting.append(heappop(self._computed)[2:])
        between_steps = [each for each in self._decoding if self._step_ends[each] <= now]
        while self._waiting:
            source, sent, life = self._waiting[0]
            received = Request(
                sent.id, sent.tokens, sent.max_new_tokens, arrival=sent.arrival, keys=sent.keys
            )
            for target in sorted(between_steps, key=lambda each: len(each.scheduler.running)):
                if target.adopt(received, life):
                    break
            else:
                return
            self._waiting.popleft()
            self._begin(source, sent, target, received, now)

    def _begin(self, source: Replica, sent: Request, target: Replica, received: Request, now: int) -> None:
        cache, free = target.scheduler.cache, self._links_free
        shared, filled = (
            tokens // cache.block_size for tokens in (received.shared_tokens, received.computed)
        )
        pages = [
            table.end - max(shared, pool.first_block(filled))
            for pool, table in zip(cache.pools, received.tables)
        ] + [1] * (cache.slots is not None)
        begin = max(now, free[source], free[target])
        free[source] = free[target] = end = begin + self._transfer_ns(pages)
        self._numbers += 1
        self.transfers.append(Transfer(begin, end, sum(pages), *map([*free].index, (source, target))))
        heappush(self._moving, (end, self._numbers, _Moving(source, sent, target, received)))

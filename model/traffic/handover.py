"""Disaggregated prefill: prompts and decoding on separate replicas, between which the pages of prompts move.

A prefill replica keeps the pages of a prompt until a decoding replica has pages for it and the copy is done. Requests
are handed over in the order in which their prompts are computed. Each goes to the decoding replica that has the fewest
requests, among those between two steps. A transfer has the links of both replicas to itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, cycle

from model.engine import Request
from model.traffic.record import Record, Timeline
from model.traffic.replica import Replica
from model.traffic.service import Arrivals
from model.traffic.workload import Workload

TransferTime = Callable[[Sequence[int]], int]
"""Function from numbers of pages, by page kind, to the time in ns in which they move between two replicas."""


@dataclass(frozen=True)
class Transfer:
    """Move of one request's pages: `sent` is the request on the source replica, `received` that on the target."""

    begin_ns: int
    end_ns: int
    pages: int
    source: Replica
    sent: Request
    target: Replica
    received: Request


class SeparateService:
    """Replicas that compute prompts, replicas that decode, and the transfers between them.

    `transfers` lists all transfers of a run, in the order in which pages were taken for them.
    """

    def __init__(
        self, prefill: Sequence[Replica], decoding: Sequence[Replica], transfer_ns: TransferTime
    ) -> None:
        self.transfers: list[Transfer] = []
        self._prefill, self._decoding = prefill, decoding
        self._transfer_ns = transfer_ns
        self._turns = cycle(prefill)
        self._numbers = count()
        self._computed: list[tuple[int, int, Replica, Request, Timeline]] = []
        self._waiting = deque[tuple[Replica, Request, Timeline]]()
        self._moving: list[tuple[int, int, Transfer]] = []
        self._step_ends = dict.fromkeys([*prefill, *decoding], 0)
        self._links_free = dict.fromkeys([*prefill, *decoding], 0)

    def run(self, workload: Workload) -> list[Record]:
        """Serve a workload until its last request has ended.

        Returns:
            The records of the prefill replicas, then those of the decoding replicas.

        Raises:
            ModelError: If a request never fits into the pages or steps of a replica.
        """
        arrivals = Arrivals(workload)
        now: int | None = 0
        while now is not None:
            for request, timeline in arrivals.pop_arrived(now):
                self._submit(request, timeline)
            self._end_transfers(now)
            self._hand_over(now)
            for replica in self._step_ends:
                if self._step_ends[replica] <= now:
                    self._step(replica, now, arrivals)
            now = self._find_next_event(now, self._step_ends, arrivals)
        records = [replica.record for replica in self._step_ends]
        for record in records:
            record.timelines.sort(key=lambda timeline: timeline.arrival_ns)
        return records

    def _find_next_event(self, now: int, replicas: Iterable[Replica], arrivals: Arrivals) -> int | None:
        """Return the next time at which a step of `replicas` or a transfer ends, or a prompt or request arrives."""
        step_ends = [end_ns for end_ns in map(self._step_ends.__getitem__, replicas) if end_ns > now]
        heads = [heap[0][0] for heap in (self._computed, self._moving) if heap]
        arrival_ns = arrivals.next_arrival_ns
        return min([*step_ends, *heads, *([] if arrival_ns is None else [arrival_ns])], default=None)

    def _submit(self, request: Request, timeline: Timeline) -> None:
        """Queue a request on the prefill replica whose turn it is."""
        replica = next(self._turns)
        if timeline.query.new_tokens > 1:
            replica.moving.add(request)
        replica.submit(request, timeline)

    def _step(self, replica: Replica, now: int, arrivals: Arrivals) -> None:
        """Let a replica begin a step, and note the prompts that it computes."""
        advance = replica.step(now, self._find_limit(replica, now, arrivals))
        if advance is None:
            return
        self._step_ends[replica] = advance.end_ns
        arrivals.schedule_next(advance.ended, advance.end_ns)
        for request, timeline in advance.computed:
            heappush(self._computed, (advance.end_ns, next(self._numbers), replica, request, timeline))

    def _find_limit(self, replica: Replica, now: int, arrivals: Arrivals) -> int | None:
        """Return the first time at which another event may change the steps of a replica, or None for never."""
        # Another replica may give the next answer. A waiting request that is admitted here makes room for a handover.
        if (arrivals.has_unsent and len(self._step_ends) > 2) or (
            self._waiting and replica.scheduler.waiting
        ):
            return now + 1
        return self._find_next_event(now, self._prefill, arrivals)

    def _end_transfers(self, now: int) -> None:
        """Free the pages of ended transfers on their sources, and let their targets decode."""
        while self._moving and self._moving[0][0] <= now:
            end_ns, _, transfer = heappop(self._moving)
            transfer.source.release(transfer.sent)
            transfer.target.receive_pages(transfer.received, end_ns)

    def _hand_over(self, now: int) -> None:
        """Begin the transfers of computed prompts, in order, while a decoding replica has pages for the next one."""
        while self._computed and self._computed[0][0] <= now:
            self._waiting.append(heappop(self._computed)[2:])
        between_steps = [replica for replica in self._decoding if self._step_ends[replica] <= now]
        while self._waiting:
            source, sent, timeline = self._waiting[0]
            received = Request(
                sent.id, sent.tokens, sent.max_new_tokens, arrival=sent.arrival, keys=sent.keys
            )
            for target in sorted(between_steps, key=lambda replica: len(replica.scheduler.running)):
                if target.adopt(received, timeline):
                    break
            else:
                return
            self._waiting.popleft()
            self._begin_transfer(source, sent, target, received, now)

    def _begin_transfer(
        self, source: Replica, sent: Request, target: Replica, received: Request, now: int
    ) -> None:
        """Begin a transfer of the pages that the target does not share, once the links of both replicas are free."""
        cache, free_ns = target.scheduler.cache, self._links_free
        shared, filled = (
            tokens // cache.block_size for tokens in (received.shared_tokens, received.computed)
        )
        pages = [
            table.end - max(shared, pool.first_block(filled))
            for pool, table in zip(cache.pools, received.tables)
        ] + [1] * (cache.slots is not None)
        begin_ns = max(now, free_ns[source], free_ns[target])
        free_ns[source] = free_ns[target] = end_ns = begin_ns + self._transfer_ns(pages)
        transfer = Transfer(begin_ns, end_ns, sum(pages), source, sent, target, received)
        self.transfers.append(transfer)
        heappush(self._moving, (end_ns, next(self._numbers), transfer))

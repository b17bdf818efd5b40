"""Disaggregated prefill: some replicas compute prompts, others decode, and the pages of prompts move between them.

A prefill replica keeps the pages of a prompt until a decoding replica has pages for it and the copy is done. Requests
are handed over in the order in which their prompts are computed. A request goes to the decoding replica with the fewest
running requests, of those that are between two steps. A transfer has the links of both replicas to itself.
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
from model.traffic.service import Arrivals, build_request
from model.traffic.workload import Query, Workload

TransferTime = Callable[[Sequence[int]], int]
"""Function from numbers of pages, by page kind, to the time in ns in which they move between two replicas."""


@dataclass(frozen=True)
class Transfer:
    """Move of one request's pages from one replica to another, from `begin_ns` to `end_ns`.

    `pages` counts the moved pages of all pools. `sent` is the request on the source, and `received` its copy on the
    target.
    """

    begin_ns: int
    end_ns: int
    pages: int
    source: Replica
    sent: Request
    target: Replica
    received: Request


class SeparateService:
    """Replicas that compute prompts, replicas that decode, and the transfers between them.

    `transfers` lists all transfers of a run, in the order in which the decoding replicas took pages for them.

    Args:
        prefill: Replicas that compute prompts.
        decoding: Replicas that decode.
        transfer_ns: Returns the time in ns in which given numbers of pages, by page kind, move between two replicas.
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
            The records of the prefill replicas, then those of the decoding replicas; timelines are sorted by arrival
            time.

        Raises:
            ModelError: If a request never fits into the pages or steps of a replica.
        """
        arrivals = Arrivals(workload)
        now: int | None = 0
        while now is not None:
            for arrival in arrivals.pop_arrived(now):
                self._submit(*build_request(arrival))
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

    def _find_next_event(
        self, now: int, replicas: Iterable[Replica], arrivals: Arrivals[Query]
    ) -> int | None:
        """Return the earliest time of the next event in ns, or None if no event is due.

        Events are the end, after `now`, of a step of one of `replicas`, the end of a transfer, the end of a step that
        computed a prompt to be moved, and the arrival of a request.
        """
        step_ends = [end_ns for end_ns in map(self._step_ends.__getitem__, replicas) if end_ns > now]
        heads = [heap[0][0] for heap in (self._computed, self._moving) if heap]
        arrival_ns = arrivals.next_arrival_ns
        return min([*step_ends, *heads, *([] if arrival_ns is None else [arrival_ns])], default=None)

    def _submit(self, request: Request, timeline: Timeline) -> None:
        """Queue a request on the prefill replica whose turn it is.

        A request of more than one new token is marked as moving, so that another replica decodes it.
        """
        replica = next(self._turns)
        if timeline.query.new_tokens > 1:
            replica.moving.add(request)
        replica.submit(request, timeline)

    def _step(self, replica: Replica, now: int, arrivals: Arrivals[Query]) -> None:
        """Let a replica begin its next step at `now`; do nothing if it has no tokens to compute.

        Records when the step ends, queues the prompts that it computes for handover, and schedules the next request of
        each user whose request ends.
        """
        advance = replica.step(now, self._find_limit(replica, now, arrivals))
        if advance is None:
            return
        self._step_ends[replica] = advance.end_ns
        arrivals.schedule_next(advance.ended, advance.end_ns)
        for request, timeline in advance.computed:
            heappush(self._computed, (advance.end_ns, next(self._numbers), replica, request, timeline))

    def _find_limit(self, replica: Replica, now: int, arrivals: Arrivals[Query]) -> int | None:
        """Return the first time in ns at which another event may change a replica's steps, or None if no event can."""
        # Another replica may give the next answer. A waiting request that is admitted here makes room for a handover.
        if (arrivals.has_unsent and len(self._step_ends) > 2) or (
            self._waiting and replica.scheduler.waiting
        ):
            return now + 1
        return self._find_next_event(now, self._prefill, arrivals)

    def _end_transfers(self, now: int) -> None:
        """End the transfers that are due at `now`: free their pages on the source, and let the target decode."""
        while self._moving and self._moving[0][0] <= now:
            end_ns, _, transfer = heappop(self._moving)
            transfer.source.release(transfer.sent)
            transfer.target.receive_pages(transfer.received, end_ns)

    def _hand_over(self, now: int) -> None:
        """Begin transfers of the prompts computed by `now`, in order, until no decoding replica takes the next one.

        A decoding replica takes a request only between two steps and with enough free pages. The other requests wait.
        """
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
        """Begin the transfer of a request's pages once the links of both replicas are free, and add it to `transfers`.

        Pages that the target has in its prefix cache do not move. Neither do pages whose positions no later token sees.
        """
        cache, free_ns = target.scheduler.cache, self._links_free
        shared, filled = (
            tokens // cache.block_size for tokens in (received.shared_tokens, received.computed)
        )
        pages = [
            table.end - max(shared, pool.find_first_block(filled))
            for pool, table in zip(cache.pools, received.tables)
        ] + [1] * (cache.slots is not None)
        begin_ns = max(now, free_ns[source], free_ns[target])
        free_ns[source] = free_ns[target] = end_ns = begin_ns + self._transfer_ns(pages)
        transfer = Transfer(begin_ns, end_ns, sum(pages), source, sent, target, received)
        self.transfers.append(transfer)
        heappush(self._moving, (end_ns, next(self._numbers), transfer))

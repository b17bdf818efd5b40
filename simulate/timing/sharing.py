"""DMA engines of a core, which its DMA queues share.

Each queue is served in order, at the rate of all DMA engines. An event starts no earlier than the DMA engines could
have moved everything that must be complete before it: by dependences, by the order of its engine and of the queues, by
full queues. Of these DMAs, those that begin after any moment take their time one after another. A DMA for which no
event waits delays no event; the end of the launch waits for all DMAs.

So the DMA engines count as serving awaited DMAs first. The sets of DMAs follow from the stream, the moments from
maxima and sums, so a lower cost or one dependence fewer never makes an event later. Chips serve the queues round robin
instead; a rule by which DMAs delay unordered DMAs has anomalies (docs/decisions/0004).

An event that waits for the last byte of a set of DMAs waits for a busy period: from the begin of its first DMA on, the
engines move one DMA after another. So each of these DMAs has a service of its own time in the period, and the critical
path runs through all services. A DMA that began early and was done early takes no more of the path than its own time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

Span = tuple[float, float, int]
"""Begin in ns, time on the engines in ns, event."""


class Service(NamedTuple):
    """Part of a busy period that one event takes; each service begins when the service before it ends."""

    start_ns: float
    end_ns: float
    event: int


class Moving(NamedTuple):
    """Busy period of the DMA engines: of the first `counts` DMAs of each queue, those from `since_ns` on.

    `last` is the DMA that begins last.
    """

    since_ns: float
    counts: tuple[int, ...]
    last: int

    def services(self, queues: Sequence[Sequence[Span]], base: int) -> list[Service]:
        """Return the services of these DMAs, as `last_busy_period` does.

        Args:
            queues: The DMAs of each queue.
            base: The number of event 0 of the core over all streams.
        """
        spans = (
            span
            for queue, count in zip(queues, self.counts)
            for span in queue[bisect_left(queue, (self.since_ns,), hi=count) : count]
        )
        return last_busy_period(spans, base)


def last_busy_period(spans: Iterable[Span], base: int) -> list[Service]:
    """Return the last services without a pause, if spans take their time in sequence, each from its begin.

    Args:
        spans: Begin, time and event of the work.
        base: The number that events of the services are counted from.
    """
    services: list[Service] = []
    end = -1.0
    for begin, busy_ns, event in sorted(spans):
        if busy_ns <= 0.0:
            continue
        if begin > end:
            services.clear()
            end = begin
        services.append(Service(end, end + busy_ns, base + event))
        end += busy_ns
    return services


class DmaEngines:
    """DMA queues of one core while its stream is placed."""

    def __init__(
        self,
        engines: int,
        triggers: Iterable[int],
        completion_ns: float,
        events: int,
        shared: bool,
    ) -> None:
        """Set the queues.

        Args:
            engines: The number of engines of the core.
            triggers: The engines that trigger DMAs; each has one queue.
            completion_ns: The shortest completion of any DMA in ns; no event can know earlier that a last byte has
                moved.
            events: The number of events of the core.
            shared: Whether queues delay each other.
        """
        self._queue_of = {engine: queue for queue, engine in enumerate(sorted(set(triggers)))}
        queues: list[list[Span]] = [[] for _ in self._queue_of]
        self.shared = shared and len(queues) > 1
        """Whether an event may have to wait for DMAs of several queues."""
        self.queues = queues
        self._free_ns = [0.0] * len(queues)
        self._completion_ns = completion_ns
        # Number of DMAs that are moved before an event's result is usable, by queue and event.
        self._needs = [[0] * events for _ in queues] if self.shared else []
        self._before_engine = [_Moved(queues) for _ in range(engines)]
        self._before_queue = [_Moved(queues) for _ in queues]

    def moved(self, engine: int, event: int, producers: list[int]) -> float:
        """Return when all DMAs that an event needs can have been moved, in ns; 0 if its engine waited for them.

        Args:
            engine: The engine of the event.
            event: The event, numbered within the core.
            producers: The events, numbered within the core, that must be complete before it, except those on its
                engine.
        """
        needed = self._before_engine[engine]
        counts, more = needed.counts, False
        for queue, needs in enumerate(self._needs):
            have = most = counts[queue]
            for producer in producers:
                count = needs[producer]
                if count > most:
                    most = count
            needs[event] = most
            if most > have:
                needed.include(queue, most)
                more = True
        return needed.end_ns + self._completion_ns if more else 0.0

    def moving(self, engine: int) -> Moving:
        """Return the last busy period of the DMAs that the events of an engine need so far."""
        return self._before_engine[engine].last_period()

    def request(self, engine: int, event: int, arrival_ns: float, busy_ns: float) -> None:
        """Record a DMA that nothing delays."""
        self.queues[self._queue_of[engine]].append((arrival_ns, busy_ns, event))

    def serve(
        self, engine: int, event: int, arrival_ns: float, busy_ns: float
    ) -> tuple[float, float, int, Moving | None]:
        """Move the data of a DMA.

        Returns:
            Begin in ns; end in ns; the DMA that it waited for, -1 for none; and the busy period that it waited for, if
            that
            has DMAs of several queues.
        """
        number = self._queue_of[engine]
        queue = self.queues[number]
        begin, last, moving = arrival_ns, -1, None
        if self._free_ns[number] > begin:
            begin, last = self._free_ns[number], queue[-1][2]
        if self.shared:
            before = self._before_queue[number]
            for other_queue, needs in enumerate(self._needs):
                if needs[event] > before.counts[other_queue]:
                    before.include(other_queue, needs[event])
            if before.end_ns > begin:
                begin, last, moving = before.end_ns, before.last, before.last_period()
            before.add(number, begin, busy_ns, event)
            for needs, count in zip(self._needs, before.counts):
                needs[event] = count
        queue.append((begin, busy_ns, event))
        end = self._free_ns[number] = begin + busy_ns
        return begin, end, last, moving

    def finished(self, base: int) -> tuple[float, list[Service]]:
        """Return when all requested DMAs can have been moved in ns, including the completion, and the last services."""
        services = last_busy_period(chain.from_iterable(self.queues), base)
        return (services[-1].end_ns + self._completion_ns if services else 0.0), services


class _Moved:
    """Set of DMAs, the first few of every queue, and when the engines have moved them if they move nothing else.

    The set stores the intervals in which the engines are busy if they never idle; their end does not depend on the
    order.
    """

    def __init__(self, queues: list[list[Span]]) -> None:
        self._queues = queues
        self.counts = [0] * len(queues)
        self._starts: list[float] = []
        self._ends: list[float] = []  # without the end of the last interval, which is `end_ns`
        self.end_ns = float("-inf")
        self.last = -1  # the DMA that begins last
        self._last_ns = float("-inf")

    def include(self, queue: int, count: int) -> None:
        """Add the DMAs of one queue up to number `count`."""
        starts, end = self._starts, self.end_ns
        for begin, busy, event in self._queues[queue][self.counts[queue] : count]:
            if busy <= 0.0:
                continue
            if begin > end:
                self._begin(begin)
                end = self.end_ns = begin + busy
            elif begin >= starts[-1]:
                end = self.end_ns = end + busy
            else:
                self._fill(begin, busy)
                if self.end_ns == end:
                    continue
                end = self.end_ns
            if begin >= self._last_ns:
                self._last_ns, self.last = begin, event
        self.counts[queue] = count

    def add(self, queue: int, begin: float, busy: float, event: int) -> None:
        """Add the next DMA of one queue, which begins after all others."""
        if busy > 0.0:
            if begin > self.end_ns:
                self._begin(begin)
            self.end_ns = begin + busy
            self._last_ns, self.last = begin, event
        self.counts[queue] += 1

    def last_period(self) -> Moving:
        """Return the busy period since the engines were idle last."""
        return Moving(self._starts[-1], tuple(self.counts), self.last)

    def _begin(self, begin: float) -> None:
        """Begin another interval after an idle time."""
        if self._starts:
            self._ends.append(self.end_ns)
        self._starts.append(begin)

    def _fill(self, begin: float, busy: float) -> None:
        """Fill `busy` ns of idle time from `begin` on."""
        starts, ends = self._starts, self._ends
        ends.append(self.end_ns)
        first = end = bisect_left(ends, begin)
        low = min(starts[end], begin)
        moment = begin
        while end < len(starts) and starts[end] <= moment + busy:
            busy -= max(starts[end] - moment, 0.0)
            moment = ends[end]
            end += 1
        starts[first:end] = [low]
        ends[first:end] = [moment + busy]
        self.end_ns = ends.pop()

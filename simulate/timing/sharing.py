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

Events are numbered within the core; `base` is the number of event 0 over all streams. An engine is given by its index
in `LANES` (`simulate.timing.phases`), and has at most one DMA queue.
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
    """Busy period of the DMA engines, in which they move one DMA after another without a pause.

    These are, of the first `counts[q]` DMAs of each queue q, those that begin at `since_ns` or later. `last` is the
    event of the DMA that begins last.
    """

    since_ns: float
    counts: tuple[int, ...]
    last: int

    def list_services(self, queues: Sequence[Sequence[Span]], base: int) -> list[Service]:
        """Return the services of these DMAs in order of time, with events numbered over all streams.

        Args:
            queues: The DMAs of each queue, in order.
            base: The number of event 0 of the core over all streams.
        """
        spans = (
            span
            for queue, count in zip(queues, self.counts)
            for span in queue[bisect_left(queue, (self.since_ns,), hi=count) : count]
        )
        return find_last_busy_period(spans, base)


def find_last_busy_period(spans: Iterable[Span], base: int) -> list[Service]:
    """Return the services after the last pause, if the engines do one piece of work after another, by begin.

    A piece of work starts at its begin, or when the work before it ends. Work that takes no time is left out.

    Args:
        spans: Pieces of work in any order: begin in ns, time in ns, event within the core.
        base: The number of event 0 of the core over all streams, which is added to the events.

    Returns:
        The services in order of time; empty without work.
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
    """DMA queues of one core, and the DMA engines that they share, while the core's stream is placed."""

    def __init__(
        self,
        engines: int,
        triggers: Iterable[int],
        completion_ns: float,
        events: int,
        shared: bool,
    ) -> None:
        """Make an empty queue for each engine that triggers DMAs.

        Args:
            engines: The number of engines of the core.
            triggers: The engines that trigger DMAs; each has one queue.
            completion_ns: The shortest completion of any DMA in ns; no event can know earlier that a last byte has
                moved.
            events: The number of events of the core.
            shared: Whether the reading lets DMAs of one queue delay those of another; has no effect with one queue.
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

    def find_moved_ns(self, engine: int, event: int, producers: list[int]) -> float:
        """Return the time in ns at which the DMA engines can have moved all DMAs that an event needs.

        Includes the shortest completion. Returns 0 if earlier events of the engine waited for all of them. Records the
        DMAs as needed by the event and by all later events of its engine. Call it only if `shared` is true.

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

    def find_needed_period(self, engine: int) -> Moving:
        """Return the last busy period of the DMAs that events of an engine have needed so far; there must be one."""
        return self._before_engine[engine].find_last_period()

    def request(self, engine: int, event: int, arrival_ns: float, busy_ns: float) -> None:
        """Append a DMA to its engine's queue that begins at `arrival_ns`, however busy the DMA engines are."""
        self.queues[self._queue_of[engine]].append((arrival_ns, busy_ns, event))

    def serve(
        self, engine: int, event: int, arrival_ns: float, busy_ns: float
    ) -> tuple[float, float, int, Moving | None]:
        """Append a DMA to its engine's queue, and move its data when earlier DMAs of the queue allow it.

        If queues are shared, it also waits for the DMAs that `find_moved_ns` recorded as needed by its event.

        Args:
            engine: The engine that triggers the DMA.
            event: The DMA, numbered within the core.
            arrival_ns: The time at which its first byte could move.
            busy_ns: The time for which it occupies the DMA engines.

        Returns:
            Begin of the data phase in ns; its end in ns; the DMA that it waited for, -1 for none; and the busy period
            that it waited for, None unless needed DMAs of other queues delayed it.
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
                begin, last, moving = before.end_ns, before.last, before.find_last_period()
            before.add(number, begin, busy_ns, event)
            for needs, count in zip(self._needs, before.counts):
                needs[event] = count
        queue.append((begin, busy_ns, event))
        end = self._free_ns[number] = begin + busy_ns
        return begin, end, last, moving

    def find_end(self, base: int) -> tuple[float, list[Service]]:
        """Return the time in ns at which all DMAs so far can be complete, and the services of the last busy period.

        Returns (0.0, []) without DMAs.

        Args:
            base: The number of event 0 of the core over all streams, which is added to the events of the services.
        """
        services = find_last_busy_period(chain.from_iterable(self.queues), base)
        return (services[-1].end_ns + self._completion_ns if services else 0.0), services


class _Moved:
    """Set of DMAs, the first `counts[q]` of every queue q, and when the engines have moved them if they move no others.

    That time is `end_ns`. The set stores the intervals in which the engines are busy if they never idle while a DMA of
    the set could move; these intervals do not depend on the order of the DMAs.
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
        """Add DMAs of one queue, so that the set has the first `count` of them."""
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
        """Add the next DMA of one queue, which begins no earlier than the end of all DMAs of the set."""
        if busy > 0.0:
            if begin > self.end_ns:
                self._begin(begin)
            self.end_ns = begin + busy
            self._last_ns, self.last = begin, event
        self.counts[queue] += 1

    def find_last_period(self) -> Moving:
        """Return the busy period since the engines were idle last; the set must not be empty."""
        return Moving(self._starts[-1], tuple(self.counts), self.last)

    def _begin(self, begin: float) -> None:
        """Begin another busy interval at `begin` ns, after an idle time; the caller sets its end in `end_ns`."""
        if self._starts:
            self._ends.append(self.end_ns)
        self._starts.append(begin)

    def _fill(self, begin: float, busy: float) -> None:
        """Insert a DMA that begins before the last busy interval: take `busy` ns of idle time from `begin` ns on.

        Intervals that meet become one; `end_ns` grows if idle time before the last interval does not suffice.
        """
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

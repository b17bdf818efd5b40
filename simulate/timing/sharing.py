"""The DMA engines of a core, which its DMA queues share.

Each queue is served in order, at the rate of all DMA engines. An event starts no earlier than the DMA engines could
have moved everything that must be complete before it: by dependences, by the order of its engine and of the queues, by
full queues. Of these DMAs, those that begin after any moment take their time one after the other. A DMA for which no
event waits delays no event; the end of the launch waits for all DMAs.

So the DMA engines count as serving first what is waited for. The sets of DMAs follow from the stream, the moments from
maxima and sums, so a lower cost or one dependence fewer never makes an event later. Chips serve the queues round robin
instead; a rule by which DMAs delay unordered DMAs has anomalies (docs/decisions/0004).

What waits for the last byte of a set of DMAs waits for a busy period: from the begin of its first DMA on, the engines
move one DMA after the other. So each of these DMAs has a service of its own time in the period, and the critical path
runs through all services. A DMA that began early and was done early takes no more of the path than its own time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

Span = tuple[float, float, int]
"""Begin in ns, time on the engines in ns, event."""


class Service(NamedTuple):
    """The part of a busy period that one event takes, where each begins when the one before it is done."""

    start_ns: float
    end_ns: float
    event: int


class Moving(NamedTuple):
    """A busy period of the DMA engines: of the first `counts` DMAs of each queue, those from `since_ns` on.

    `last` is the DMA that begins last.
    """

    since_ns: float
    counts: tuple[int, ...]
    last: int

    def services(self, queues: Sequence[Sequence[Span]], base: int) -> list[Service]:
        """These DMAs one after the other, as `last_busy_period` gives them."""
        spans = (
            span
            for queue, count in zip(queues, self.counts)
            for span in queue[bisect_left(queue, (self.since_ns,), hi=count) : count]
        )
        return last_busy_period(spans, base)


def last_busy_period(spans: Iterable[Span], base: int) -> list[Service]:
    """What is done last without a pause, if `spans` take their time one after the other, each from its begin.

    Events of the services are numbered from `base` on.
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
    """The DMA queues of one core while its stream is placed.

    `triggers`: the engines, numbered below `engines`, that trigger DMAs; each has one queue. `completion_ns`: the
    shortest completion of any DMA, in ns; no event can know earlier that a DMA's last byte has moved. `events`: the
    number of events of the core, which are numbered from 0. `shared`: whether queues delay each other.
    """

    def __init__(
        self,
        engines: int,
        triggers: Iterable[int],
        completion_ns: float,
        events: int,
        shared: bool,
    ) -> None:
        self._queue_of = {engine: queue for queue, engine in enumerate(sorted(set(triggers)))}
        queues: list[list[Span]] = [[] for _ in self._queue_of]
        self.shared = shared and len(queues) > 1
        """Whether an event may have to wait for what several queues move."""
        self.queues = queues
        self._free_ns = [0.0] * len(queues)
        self._completion_ns = completion_ns
        # By queue and event: how many DMAs of the queue are moved before the event's result is usable.
        self._needs = [[0] * events for _ in queues] if self.shared else []
        self._before_engine = [_Moved(queues) for _ in range(engines)]
        self._before_queue = [_Moved(queues) for _ in queues]

    def moved(self, engine: int, event: int, producers: list[int]) -> float:
        """When all DMAs that an event needs can have been moved, in ns; 0 where its engine has waited for all of them.

        `event` and `producers` are numbers within the core; the producers are those that must be complete before the
        event; producers on the engine of the event do not count.
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
        """What the DMA engines move in the end of all that the events of an engine so far need."""
        return self._before_engine[engine].in_the_end()

    def request(self, engine: int, event: int, arrival_ns: float, busy_ns: float) -> None:
        """Note a DMA that nothing delays."""
        self.queues[self._queue_of[engine]].append((arrival_ns, busy_ns, event))

    def serve(
        self, engine: int, event: int, arrival_ns: float, busy_ns: float
    ) -> tuple[float, float, int, Moving | None]:
        """Move the data of a DMA: (begin in ns, end in ns, the DMA it waited for or -1, the set if not that alone)."""
        number = self._queue_of[engine]
        queue = self.queues[number]
        begin, last, moving = arrival_ns, -1, None
        if self._free_ns[number] > begin:
            begin, last = self._free_ns[number], queue[-1][2]
        if self.shared:
            before = self._before_queue[number]
            for other, needs in enumerate(self._needs):
                if needs[event] > before.counts[other]:
                    before.include(other, needs[event])
            if before.end_ns > begin:
                begin, last, moving = before.end_ns, before.last, before.in_the_end()
            before.add(number, begin, busy_ns, event)
            for needs, count in zip(self._needs, before.counts):
                needs[event] = count
        queue.append((begin, busy_ns, event))
        end = self._free_ns[number] = begin + busy_ns
        return begin, end, last, moving

    def finished(self, base: int) -> tuple[float, list[Service]]:
        """When all that was asked for can have been moved and that is known, in ns, and what is moved in the end."""
        services = last_busy_period(chain.from_iterable(self.queues), base)
        return (services[-1].end_ns + self._completion_ns if services else 0.0), services


class _Moved:
    """A set of DMAs, the first few of every queue, and when the engines alone with them have moved them all.

    Kept are the intervals in which they are busy if they never idle; their end is the same whatever the order.
    """

    def __init__(self, queues: list[list[Span]]) -> None:
        self._queues = queues
        self.counts = [0] * len(queues)
        self._starts: list[float] = []
        self._ends: list[float] = []  # that of the last interval is `end_ns`
        self.end_ns = float("-inf")
        self.last = -1  # the one that begins last
        self._last_ns = float("-inf")

    def include(self, queue: int, count: int) -> None:
        """Take in the first `count` of one queue, more than so far."""
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
        """Take in the next of one queue, which begins after all others."""
        if busy > 0.0:
            if begin > self.end_ns:
                self._begin(begin)
            self.end_ns = begin + busy
            self._last_ns, self.last = begin, event
        self.counts[queue] += 1

    def in_the_end(self) -> Moving:
        """The DMAs since the engines were idle last."""
        return Moving(self._starts[-1], tuple(self.counts), self.last)

    def _begin(self, begin: float) -> None:
        """After some idle time another interval begins."""
        if self._starts:
            self._ends.append(self.end_ns)
        self._starts.append(begin)

    def _fill(self, begin: float, busy: float) -> None:
        """Take time from `begin` on where there is some."""
        starts, ends = self._starts, self._ends
        ends.append(self.end_ns)
        first = at = bisect_left(ends, begin)
        low = min(starts[at], begin)
        moment = begin
        while at < len(starts) and starts[at] <= moment + busy:
            busy -= max(starts[at] - moment, 0.0)
            moment = ends[at]
            at += 1
        starts[first:at] = [low]
        ends[first:at] = [moment + busy]
        self.end_ns = ends.pop()

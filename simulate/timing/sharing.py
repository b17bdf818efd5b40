"""The DMA engines of a core, which its DMA queues share.

Each queue is served in order, at the rate of all DMA engines. An event starts no earlier than the DMA engines could
have moved everything that must be complete before it: by dependences, by the order of its engine and of the queues, by
full queues. Of these DMAs, those that begin after any moment take their time one after the other. A DMA for which no
event waits delays no event; the end of the launch waits for all DMAs.

So the DMA engines count as serving first what is waited for. The sets of DMAs follow from the stream, the moments from
maxima and sums, so a lower cost or one dependence fewer never makes an event later. Chips serve the queues round robin
instead; a rule by which DMAs delay unordered DMAs has anomalies (docs/decisions/0004).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain

_Dma = tuple[float, float, int]
"""Begin in ns, time on the engines in ns, event."""


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
        queues: list[list[_Dma]] = [[] for _ in self._queue_of]
        self.shared = shared and len(queues) > 1
        """Whether an event may have to wait for what several queues move."""
        self._queues = queues
        self._free_ns = [0.0] * len(queues)
        self._completion_ns = completion_ns
        # By queue and event: how many DMAs of the queue are moved before the event's result is usable.
        self._needs = [[0] * events for _ in queues] if self.shared else []
        self._before_engine = [_Moved(queues) for _ in range(engines)]
        self._before_queue = [_Moved(queues) for _ in queues]

    def moved(self, engine: int, event: int, producers: list[int]) -> float:
        """When all DMAs that an event needs can have been moved, in ns; 0 where its engine has waited for all of them.

        `event` and `producers` are numbers within the core; the producers are those that must be complete before the
        event, except for those that its engine carries out itself.
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

    def moved_last(self, engine: int) -> int:
        """A DMA that is moved last of all that the events of an engine so far need."""
        return self._before_engine[engine].last

    def serve(self, engine: int, event: int, arrival_ns: float, busy_ns: float) -> tuple[float, float, int]:
        """Move the data of a DMA: (begin in ns, end in ns, the DMA it waited for or -1)."""
        number = self._queue_of[engine]
        queue = self._queues[number]
        begin, last = arrival_ns, -1
        if self._free_ns[number] > begin:
            begin, last = self._free_ns[number], queue[-1][2]
        if self.shared:
            before = self._before_queue[number]
            for other, needs in enumerate(self._needs):
                if needs[event] > before.counts[other]:
                    before.include(other, needs[event])
            if before.end_ns > begin:
                begin, last = before.end_ns, before.last
            before.add(number, begin, busy_ns, event)
            for needs, count in zip(self._needs, before.counts):
                needs[event] = count
        queue.append((begin, busy_ns, event))
        end = self._free_ns[number] = begin + busy_ns
        return begin, end, last

    def finished(self) -> tuple[float, int]:
        """When all that was asked for can have been moved, and a DMA that is moved last or -1."""
        if not self.shared:
            return 0.0, -1
        end_ns, last = -1.0, -1
        for begin, busy_ns, event in sorted(chain.from_iterable(self._queues)):
            if busy_ns > 0.0:
                end_ns, last = max(end_ns, begin) + busy_ns, event
        return (end_ns + self._completion_ns, last) if last >= 0 else (0.0, -1)


class _Moved:
    """A set of DMAs, the first few of every queue, and when the engines alone with them have moved them all.

    Kept are the intervals in which they are busy if they never idle; their end is the same whatever the order.
    """

    def __init__(self, queues: list[list[_Dma]]) -> None:
        self._queues = queues
        self.counts = [0] * len(queues)
        self._starts: list[float] = []
        self._ends: list[float] = []  # that of the last interval is `end_ns`
        self.end_ns = float("-inf")
        self.last = -1

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
            self.last = event
        self.counts[queue] = count

    def add(self, queue: int, begin: float, busy: float, event: int) -> None:
        """Take in the next of one queue, which begins after all others."""
        if busy > 0.0:
            if begin > self.end_ns:
                self._begin(begin)
            self.end_ns, self.last = begin + busy, event
        self.counts[queue] += 1

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

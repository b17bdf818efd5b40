"""What a compiler does to the order of a stream: oldest ready first, within a window, on each engine.

A stream is cut at its meetings, and each stretch is placed step by step. An event is ready to be chosen when
everything it waits for has been placed and fewer than `WINDOW` events of its engine that come before it are still
unplaced. Of each engine's events that could start at once the oldest is taken, on the Scalar engine the
oldest that needs no table load, if there is one; if none could, the one that can start first. Among the engines the
earliest start comes first. So a stall of one event lets later ones of its engine pass, as far as dependences allow.

The list is greedy: like every list it has anomalies, so a cost halved may lengthen it. It is not the compiler's, whose
rules are not published.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

WINDOW = 64
"""Events of one engine that may be in the air: our choice; the compiler's is not published."""


class Core(Protocol):
    """What the list needs to know of the core whose events it places."""

    free_ns: list[float]

    def lane(self, event: int) -> int:
        """The engine whose stream issues an event."""

    def earliest(self, event: int) -> float:
        """The first moment at which an event may start, as things stand."""

    def admitted(self, event: int) -> float:
        """The moment at which an event that is next on its engine starts."""

    def place(self, event: int, start: float) -> None:
        """Let an event start."""

    def switches_table(self, event: int) -> bool:
        """An activation that needs another table than the one loaded."""


def place_oldest_ready(core: Core, first: int, end: int, before: Sequence[Sequence[int]]) -> None:
    """Place the events first ... end of a core, which meet nobody."""
    _Stretch(core, first, end, before).run()


class _Stretch:
    """Events between two meetings. Lists are by engine; positions count the events of one engine."""

    def __init__(self, core: Core, first: int, end: int, before: Sequence[Sequence[int]]) -> None:
        self.core = core
        self.first = first
        self.lanes = [core.lane(event) for event in range(first, end)]
        engines = len(core.free_ns)
        self.events: list[list[int]] = [[] for _ in range(engines)]
        self.position = []
        for event, lane in enumerate(self.lanes, first):
            self.position.append(len(self.events[lane]))
            self.events[lane].append(event)
        self.placed = bytearray(end - first)
        self.oldest = [0] * engines
        self.followers: list[list[int]] = [[] for _ in self.lanes]
        self.missing = [0] * len(self.lanes)
        self.beyond: list[list[int]] = [[] for _ in range(engines)]  # complete, but not in the window yet
        self.waiting: list[list[tuple[float, int]]] = [[] for _ in range(engines)]  # by their earliest start
        self.startable: list[list[int]] = [[] for _ in range(engines)]  # as soon as their engine is free
        low, high = first * 4, end * 4
        followers = self.followers
        for number, waits in enumerate(before[first:end]):
            for packed in waits:
                if low <= packed < high:
                    followers[(packed >> 2) - first].append(first + number)
                    self.missing[number] += 1

    def run(self) -> None:
        """Place all of them."""
        core = self.core
        for number, missing in enumerate(self.missing):
            if not missing:
                self._complete(self.first + number)
        for _ in range(len(self.lanes)):
            event = self._chosen()
            core.place(event, core.admitted(event))
            self._leave(event)
            for follower in self.followers[event - self.first]:
                number = follower - self.first
                self.missing[number] -= 1
                if not self.missing[number]:
                    self._complete(follower)

    def _complete(self, event: int) -> None:
        """Everything that the event waits for has been placed."""
        number = event - self.first
        lane = self.lanes[number]
        if self.position[number] < self.oldest[lane] + WINDOW:
            heappush(self.waiting[lane], (self.core.earliest(event), event))
        else:
            heappush(self.beyond[lane], event)

    def _leave(self, event: int) -> None:
        """The event is placed: the window of its engine may move on."""
        lane = self.lanes[event - self.first]
        self.placed[event - self.first] = 1
        events, at = self.events[lane], self.oldest[lane]
        while at < len(events) and self.placed[events[at] - self.first]:
            at += 1
        self.oldest[lane] = at
        beyond = self.beyond[lane]
        while beyond and self.position[beyond[0] - self.first] < at + WINDOW:
            later = heappop(beyond)
            heappush(self.waiting[lane], (self.core.earliest(later), later))

    def _chosen(self) -> int:
        """The next event to be placed, taken from its heap."""
        best, start = -1, float("inf")
        for lane, waiting in enumerate(self.waiting):
            free, startable = self.core.free_ns[lane], self.startable[lane]
            while waiting and waiting[0][0] <= free:
                heappush(startable, heappop(waiting)[1])
            if startable:
                moment = free
            elif waiting:
                moment = waiting[0][0]
            else:
                continue
            if moment < start:
                best, start = lane, moment
        startable = self.startable[best]
        if not startable:
            return heappop(self.waiting[best])[1]
        if self.core.switches_table(startable[0]):
            kept = [event for event in startable if not self.core.switches_table(event)]
            if kept:
                event = min(kept)
                startable.remove(event)
                startable.sort()
                return event
        return heappop(startable)

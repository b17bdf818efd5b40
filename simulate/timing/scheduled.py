"""What a compiler does to the order of a stream: oldest ready first, within a window, on each engine.

A stream is cut at its rendezvous, and each stretch is placed step by step. An event is ready to be chosen when
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

_NEVER = float("inf")
WINDOW = 64
"""Events of one engine that may be in the air: our choice; the compiler's is not published."""


class Core(Protocol):
    """What the list needs to know of the core whose events it places."""

    free_ns: list[float]
    lanes: list[int]
    """For every event, from `base` on, the engine whose stream issues it."""
    base: int

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
    """Events between two rendezvous. Lists are by engine; positions count the events of one engine."""

    def __init__(self, core: Core, first: int, end: int, before: Sequence[Sequence[int]]) -> None:
        self.core = core
        self.first = first
        self.lanes = core.lanes[first - core.base : end - core.base]
        engines = len(core.free_ns)
        self.events: list[list[int]] = [[] for _ in range(engines)]
        self.position = []
        for event, lane in enumerate(self.lanes, first):
            events = self.events[lane]
            self.position.append(len(events))
            events.append(event)
        self.placed = bytearray(end - first)
        self.oldest = [0] * engines
        self.beyond: list[list[int]] = [[] for _ in range(engines)]  # complete, but not in the window yet
        self.waiting: list[list[tuple[float, int]]] = [[] for _ in range(engines)]  # by their earliest start
        self.startable: list[list[int]] = [[] for _ in range(engines)]  # as soon as their engine is free
        self.next_ns = [_NEVER] * engines  # when the first of those two starts
        self.missing = [0] * len(self.lanes)
        # The followers of an event are a chain of links, from `chain` of the event to -1.
        self.chain = [-1] * len(self.lanes)
        self.links: list[int] = []
        self.followers: list[int] = []
        low, high = first * 4, end * 4
        chain, links, followers = self.chain, self.links, self.followers
        for event in range(first, end):
            known = len(links)
            for packed in before[event]:
                if low <= packed < high:
                    producer = (packed >> 2) - first
                    links.append(chain[producer])
                    chain[producer] = len(followers)
                    followers.append(event)
            self.missing[event - first] = len(links) - known

    def run(self) -> None:
        """Place all of them."""
        admitted, place = self.core.admitted, self.core.place
        first, missing, links, followers = self.first, self.missing, self.links, self.followers
        for event in [event for event, producers in enumerate(missing, first) if not producers]:
            self._complete(event)
        for _ in range(len(self.lanes)):
            event = self._chosen()
            place(event, admitted(event))
            self._leave(event)
            link = self.chain[event - first]
            while link >= 0:
                follower = followers[link]
                missing[follower - first] -= 1
                if not missing[follower - first]:
                    self._complete(follower)
                link = links[link]

    def _complete(self, event: int) -> None:
        """Everything that the event waits for has been placed: it may be chosen, if the window has reached it."""
        number = event - self.first
        lane = self.lanes[number]
        if self.position[number] < self.oldest[lane] + WINDOW:
            start = self.core.earliest(event)
            if start <= self.core.free_ns[lane]:
                heappush(self.startable[lane], event)
                start = self.core.free_ns[lane]
            else:
                heappush(self.waiting[lane], (start, event))
            if start < self.next_ns[lane]:
                self.next_ns[lane] = start
        else:
            heappush(self.beyond[lane], event)

    def _leave(self, event: int) -> None:
        """The event is placed: its engine is free later, and its window may move on."""
        lane = self.lanes[event - self.first]
        free, waiting, startable = self.core.free_ns[lane], self.waiting[lane], self.startable[lane]
        while waiting and waiting[0][0] <= free:
            heappush(startable, heappop(waiting)[1])
        self.next_ns[lane] = free if startable else waiting[0][0] if waiting else _NEVER
        self.placed[event - self.first] = 1
        events, at = self.events[lane], self.oldest[lane]
        if events[at] != event:
            return
        while at < len(events) and self.placed[events[at] - self.first]:
            at += 1
        self.oldest[lane] = at
        beyond = self.beyond[lane]
        while beyond and self.position[beyond[0] - self.first] < at + WINDOW:
            self._complete(heappop(beyond))

    def _chosen(self) -> int:
        """The next event to be placed, taken from its heap."""
        best = self.next_ns.index(min(self.next_ns))
        startable = self.startable[best]
        if not startable:
            return heappop(self.waiting[best])[1]
        if len(startable) > 1 and self.core.switches_table(startable[0]):
            kept = [event for event in startable if not self.core.switches_table(event)]
            if kept:
                event = min(kept)
                startable.remove(event)
                startable.sort()
                return event
        return heappop(startable)

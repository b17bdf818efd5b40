"""List scheduling: a model of how a compiler reorders a stream. Policy: oldest ready event first, within a window.

A stream is cut at its rendezvous, and each segment is scheduled separately. An event may be chosen when all events that
it waits for have been placed and fewer than `WINDOW` earlier events of its engine are still unplaced. The engine whose
event can start earliest comes first. That engine takes its oldest event that can start at once; among such events of
the Scalar engine, an event that needs no table load comes first. If none can start at once, the engine takes the event
with the earliest start. So later events of an engine pass a stalled event, as far as dependences allow.

A list scheduler is greedy and has anomalies: half the cost of one event may lengthen the schedule. The rules of the
Neuron compiler are not published; these are our own.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from simulate.timing.core import Core
from simulate.timing.edges import Edges
from simulate.timing.readings import WINDOW

_NEVER = float("inf")


class ListScheduler:
    """Scheduler that places a launch segment by segment: a segment is the events of one core between two rendezvous.

    An object serves one placing of a launch, since `run` counts its dependences down.
    """

    def __init__(self, edges: Edges) -> None:
        self._followers, self._ends, self._missing = edges.list_followers()

    def run(self, core: Core, first: int, end: int) -> None:
        """Place the events of a core from `first` up to, but not including, `end`, as the policy orders them."""
        followers, ends, missing = self._followers, self._ends, self._missing
        ready = _Ready(core, first, end)
        add, take, advance = ready.add, ready.take, ready.advance
        find_start, start_event, operands = core.find_start, core.start_event, ready.operands
        for event in range(first, end):
            if not missing[event]:
                add(event)
        for _ in range(first, end):
            event = take()
            ready_ns, last = operands[event - first]
            start_event(event, find_start(event, ready_ns, last))
            advance(event)
            for follower in followers[ends[event] : ends[event + 1]]:
                unplaced = missing[follower] - 1
                missing[follower] = unplaced
                if not unplaced:
                    add(follower)


class _Ready:
    """Events of a segment whose producers have all been placed, by lane (the index of an engine).

    A position is the index of an event among the segment's events of its engine.
    """

    def __init__(self, core: Core, first: int, end: int) -> None:
        self._core = core
        self._first = first
        self._free_ns = core.free_ns
        engines = len(core.free_ns)
        self._lanes = core.lanes[first - core.base : end - core.base]
        self._events: list[list[int]] = [[] for _ in range(engines)]
        self._position = []
        for event, lane in enumerate(self._lanes, first):
            events = self._events[lane]
            self._position.append(len(events))
            events.append(event)
        self._placed = bytearray(end - first)
        self.operands = [(0.0, -1)] * (end - first)  # results of `Core.find_ready_moment`
        self._oldest = [0] * engines  # the position where the window begins
        self._beyond: list[list[int]] = [[] for _ in range(engines)]  # ready, but not in the window yet
        self._later: list[list[tuple[float, int]]] = [[] for _ in range(engines)]  # by their earliest start
        self._at_once: list[list[int]] = [[] for _ in range(engines)]  # can start when their engine is free
        self._next_ns = [_NEVER] * engines  # earliest start of an event in `_later` or `_at_once`

    def add(self, event: int) -> None:
        """Add an event whose producers have all been placed; it can be taken once it is inside the window."""
        number = event - self._first
        lane = self._lanes[number]
        if self._position[number] >= self._oldest[lane] + WINDOW:
            heappush(self._beyond[lane], event)
            return
        core = self._core
        operands = self.operands[number] = core.find_ready_moment(event)
        start, free_ns = core.estimate_start(event, operands[0]), self._free_ns[lane]
        if start <= free_ns:
            heappush(self._at_once[lane], event)
            start = free_ns
        else:
            heappush(self._later[lane], (start, event))
        if start < self._next_ns[lane]:
            self._next_ns[lane] = start

    def take(self) -> int:
        """Remove and return the event that is placed next.

        It is the oldest event that can start at once, on the engine whose event can start first.
        """
        next_ns = self._next_ns
        lane = next_ns.index(min(next_ns))
        at_once = self._at_once[lane]
        if not at_once:
            return heappop(self._later[lane])[1]
        if len(at_once) > 1:
            switches = self._core.switches_table
            if switches(at_once[0]):
                kept = [event for event in at_once if not switches(event)]
                if kept:
                    at_once.remove(min(kept))
                    heapify(at_once)
                    return min(kept)
        return heappop(at_once)

    def advance(self, event: int) -> None:
        """Update the state of an event's engine after the event has been placed, and move its window on.

        Clears `placed.in_order` if an older event of the engine is still unplaced.
        """
        number = event - self._first
        lane = self._lanes[number]
        free_ns, later, at_once = self._free_ns[lane], self._later[lane], self._at_once[lane]
        while later and later[0][0] <= free_ns:
            heappush(at_once, heappop(later)[1])
        self._next_ns[lane] = free_ns if at_once else later[0][0] if later else _NEVER
        self._placed[number] = 1
        events, position = self._events[lane], self._oldest[lane]
        if events[position] != event:
            self._core.placed.in_order = False
            return
        while position < len(events) and self._placed[events[position] - self._first]:
            position += 1
        self._oldest[lane] = position
        beyond = self._beyond[lane]
        while beyond and self._position[beyond[0] - self._first] < position + WINDOW:
            self.add(heappop(beyond))

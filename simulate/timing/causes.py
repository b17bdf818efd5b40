"""Reasons why events start no earlier, and the critical path: the chain of events that follows from them.

`simulate.timing.core` records one cause for each event while it places a stream in time. `Timeline.critical_path` walks
back from the end of the launch over these causes (`Path`). Events of all cores are numbered through: event i of stream
s is `bases[s] + i`. A service is the time that one event takes of an engine, or of the DMA engines, in a busy period
(`simulate.timing.sharing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from simulate.isa.plan import Phase
from simulate.timing.sharing import Moving, Service, Span


class Reason(IntEnum):
    """Reason why an event starts no earlier."""

    begin = 0  # nothing precedes the event
    engine = 1  # its engine is busy
    operands = 2  # an operand is not ready
    destination = 3  # its destination is still read
    order = 4  # an earlier write of the same engine to the same bytes
    table_load = 5
    outstanding = 6  # its DMA queue is full
    pool = 7  # the DMA engines move earlier DMAs of its queue, or DMAs that must be complete before
    rendezvous = 8  # another member enters later
    turn = 9  # serial reading: an earlier event of its core is not finished
    shared = 10  # the DMA engines cannot have moved all DMAs that it needs, in several queues together
    room = 11  # another write to its tile has not started, which waits until the tile's bytes are free

    def __str__(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Reason.begin: "at the beginning",
    Reason.engine: "after its engine's",
    Reason.operands: "operand of",
    Reason.destination: "destination read by",
    Reason.order: "same place as",
    Reason.table_load: "table load after",
    Reason.outstanding: "queue full until",
    Reason.pool: "DMA engines taken by",
    Reason.rendezvous: "in rendezvous with",
    Reason.turn: "serial order after",
    Reason.shared: "DMA engines shared with",
    Reason.room: "same tile as",
}

# The phase of the awaited event with which a wait ends; None if the wait ends when that event starts.
_ENDS_WITH: dict[Reason, Phase | None] = {
    Reason.engine: Phase.issue,
    Reason.operands: Phase.completion,
    Reason.destination: Phase.issue,
    Reason.order: Phase.issue,
    Reason.table_load: Phase.issue,
    Reason.outstanding: Phase.completion,
    Reason.rendezvous: None,
    Reason.room: None,
}

_AFTER_A_LOAD = (Reason.table_load, Reason.begin, Reason.turn)
"""Reasons with which a table load directly before an event belongs to the event's step of the critical path."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """Event of the critical path: event `event`, numbered within stream `stream`, and why it starts no earlier.

    The event occupies the path from `enter_ns` on, until the next step can begin. `until` is the phase of this event
    whose end the next step waits for: issue, data, or completion for its result, also if the event is no DMA; None if
    the next step waits for this event's start. `served_ns` is None unless the next step waits for a whole busy period
    of an engine or of the DMA engines; then it is the end of this event's service in that period.
    """

    stream: int
    event: int
    reason: Reason
    enter_ns: float
    until: Phase | None
    served_ns: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Causes:
    """Event that each event waited for last, and why; events are numbered over all streams, -1 for none.

    `event[e]` is the event that decided the start of e, for `reason[e]` (a `Reason` as an integer). `pool[e]` is the
    DMA that kept the data phase of DMA e from starting. `results[e]` is (event, `Reason` as an integer) where the
    result of another event delayed the result of e. `moving` has the busy periods of the DMA engines that events waited
    for: `moving[2 * e]` before the start of e, `moving[2 * e + 1]` before its data phase. `queues[core][queue]` lists
    the DMAs.

    `services` is what engines carry out at the end, if the end of the launch waits longer for that than for any event,
    else empty. It is the work of the DMA engines until the completion of the last DMA, or in the dataflow reading the
    work of an engine until its last issue interval is over. `services_until` is that phase.
    """

    event: NDArray[np.int32]
    reason: NDArray[np.int8]
    pool: NDArray[np.int32]
    results: dict[int, tuple[int, int]]
    moving: dict[int, Moving]
    queues: Sequence[Sequence[Sequence[Span]]]
    services: Sequence[Service]
    services_until: Phase


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Times of every event in ns, by its number over all streams, and whether it runs on the DMA engines.

    `end` is the end of the issue interval, `ready` the time from which on the result is usable. `table_load` and
    `data_start` are the begins of the event's table load and data phase, -1 where an event has none.
    """

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    ready: NDArray[np.float64]
    table_load: NDArray[np.float64]
    data_start: NDArray[np.float64]
    on_dma: NDArray[np.bool_]


class Path:
    """Critical path of a timeline, found from its end: each step determines the step before it.

    `bases` has the number of event 0 of each stream over all streams, and at the end the number of all events. Use an
    object once: `find_steps` consumes its state.
    """

    def __init__(self, causes: Causes, columns: Columns, bases: tuple[int, ...]) -> None:
        self._causes, self._columns, self._bases = causes, columns, bases
        self._steps: list[PathStep] = []
        # The event whose step is added next, and `until` and `served_ns` of that step.
        self._event = -1
        self._until: Phase | None = None
        self._served_ns: float | None = None

    def find_steps(self) -> tuple[PathStep, ...]:
        """Return the steps of the path, first event first; the last step is the event that ends last."""
        columns, services = self._columns, self._causes.services
        last = int(np.argmax(np.maximum(columns.end, columns.ready)))
        self._continue_with(last, self._find_last_phase(last))
        self._add_services(services, self._causes.services_until)
        while self._event >= 0:
            self._add_step()
        return tuple(reversed(self._steps))

    def _add_step(self) -> None:
        """Append the step of the current event, and make the event that it waited for the current event.

        The current event becomes -1 if nothing delayed the event, which ends the path.
        """
        causes, columns, event = self._causes, self._columns, self._event
        if self._until is Phase.completion and event in causes.results:
            producer, why = causes.results[event]
            self._append(Reason(why), float(columns.ready[producer]))
            self._continue_with(producer, Phase.completion)
        elif self._until in (Phase.data, Phase.completion) and causes.pool[event] >= 0:
            begin = float(columns.data_start[event])
            self._append(Reason.pool, begin)
            self._continue_with(int(causes.pool[event]), Phase.data, begin)
            self._add_services(self._list_services(event, 2 * event + 1), Phase.data)
        else:
            reason, cause = Reason(int(causes.reason[event])), int(causes.event[event])
            loads = reason in _AFTER_A_LOAD and columns.table_load[event] >= 0.0
            self._append(reason, float((columns.table_load if loads else columns.start)[event]))
            if reason is Reason.shared:
                self._add_services(self._list_services(event, 2 * event), Phase.completion)
            else:
                self._continue_with(cause, self._find_awaited_phase(cause, reason))

    def _append(self, reason: Reason, enter_ns: float) -> None:
        """Append the current event as a step, without changing the current event."""
        stream = int(np.searchsorted(self._bases, self._event, side="right")) - 1
        event = self._event - self._bases[stream]
        self._steps.append(PathStep(stream, event, reason, enter_ns, self._until, self._served_ns))

    def _continue_with(self, event: int, until: Phase | None, served_ns: float | None = None) -> None:
        """Make an event the current event, with `until` and `served_ns` of its `PathStep`."""
        self._event, self._until, self._served_ns = event, until, served_ns

    def _find_awaited_phase(self, cause: int, reason: Reason) -> Phase | None:
        """Return the phase of event `cause` at whose end a wait for it ends, None if the wait ends at its start.

        Args:
            cause: The awaited event, by its number over all streams.
            reason: Why the waiting event waits.
        """
        if reason is Reason.turn or (reason is Reason.destination and self._columns.on_dma[cause]):
            return self._find_last_phase(cause)
        return _ENDS_WITH.get(reason)

    def _find_last_phase(self, event: int) -> Phase:
        """Return the phase of an event that ends last: completion, or issue if its engine is busy beyond its result."""
        return Phase.completion if self._columns.ready[event] >= self._columns.end[event] else Phase.issue

    def _list_services(self, event: int, key: int) -> list[Service]:
        """Return the services of the busy period of the DMA engines that an event waited for, first one first.

        Events of the services are numbered over all streams. Empty if no busy period is recorded under `key`.

        Args:
            event: The event that waits.
            key: Key of `Causes.moving`: 2 * event for the event's start, 2 * event + 1 for its data phase.
        """
        moving = self._causes.moving.get(key)
        if moving is None:
            return []
        stream = int(np.searchsorted(self._bases, event, side="right")) - 1
        return moving.list_services(self._causes.queues[stream], self._bases[stream])

    def _add_services(self, services: Sequence[Service], until: Phase) -> None:
        """Append a step for each service but the first, last one first, and make the first the current event.

        Changes nothing if there are no services.

        Args:
            services: The services of a busy period, in order of time.
            until: The phase of the last service's event whose end the step after it waits for.
        """
        reason = Reason.engine if until is Phase.issue else Reason.pool
        for service in reversed(services[1:]):
            self._continue_with(service.event, until, service.end_ns)
            self._append(reason, service.start_ns)
            until = Phase.issue if until is Phase.issue else Phase.data
        if services:
            self._continue_with(services[0].event, until, services[0].end_ns)

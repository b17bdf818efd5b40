"""Why every event starts no earlier, and the chain of events that follows from it: the critical path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from simulate.isa.plan import Phase
from simulate.timing.sharing import Moving, Service, Span


class Reason(IntEnum):
    """Why an event starts no earlier."""

    begin = 0  # nothing before it
    engine = 1  # its engine is busy
    operands = 2  # an operand is not ready
    destination = 3  # its destination is still read
    order = 4  # an earlier write of the same engine to the same place
    table_load = 5
    outstanding = 6  # its DMA queue is full
    pool = 7  # the DMA engines move what is before it in its queue or must be complete before
    rendezvous = 8  # another member comes later
    turn = 9  # serial reading: what is before it on its core is not finished
    shared = 10  # the DMA engines cannot have moved all that it needs, in several queues together
    room = 11  # another write to its tile has not started, which waits until the tile's bytes are free

    def __str__(self) -> str:
        return _SAID[self]


_SAID = {
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

# The phase of another event that a wait ends with; None: the wait ends when that event starts.
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
"""Why an event starts no earlier, if a table load directly before it, where there is one, belongs to its step."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One event of the critical path and why it starts no earlier. Nothing before it delays it from `enter_ns` on.

    `until` is the phase of the event that the next step waits for: issue, data, or completion for its result, also
    where it is no DMA; None for its start. Where the engines that carry out the event delay the next step by all that
    they have to do, the event's part of that ends at `served_ns`.
    """

    stream: int
    event: int
    reason: Reason
    enter_ns: float
    until: Phase | None
    served_ns: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Causes:
    """What each event waited for last, by its number over all streams: an event or -1, and why.

    `pool` is the DMA that kept a data phase from starting. `results` holds the events whose result was held up, by the
    result of which event and why. `moving` tells, by twice the number of an event, which DMAs its start waited for, if
    for several that share the DMA engines; and by that number plus one, for which its data phase waited. `queues` are
    the DMAs of every core by queue. `services` is what engines carry out in the end, if the end of the launch waits
    longer for that than for any event: the DMA engines until the completion of the last DMA, or in the dataflow reading
    an engine until its last issue interval is over; `services_until` is that phase.
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
    """Moments of every event in ns, negative where there is none, and whether it runs on the DMA engines."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    ready: NDArray[np.float64]
    table_load: NDArray[np.float64]
    data_start: NDArray[np.float64]
    on_dma: NDArray[np.bool_]


class Path:
    """The critical path of a timeline, found from its end: each step waits for the next one to be found."""

    def __init__(self, causes: Causes, columns: Columns, bases: tuple[int, ...]) -> None:
        self._causes, self._columns, self._bases = causes, columns, bases
        self._steps: list[PathStep] = []
        # The event whose part of the path comes next, and `until` and `served_ns` of its step.
        self._at = -1
        self._until: Phase | None = None
        self._served_ns: float | None = None

    def steps(self) -> tuple[PathStep, ...]:
        """The steps, first event first."""
        columns, services = self._columns, self._causes.services
        last = int(np.argmax(np.maximum(columns.end, columns.ready)))
        self._after(last, self._finish(last))
        self._through(services, self._causes.services_until)
        while self._at >= 0:
            self._back()
        return tuple(reversed(self._steps))

    def _back(self) -> None:
        """Add the step of the event whose part comes next, and find what that waited for."""
        causes, columns, event = self._causes, self._columns, self._at
        if self._until is Phase.completion and event in causes.results:
            producer, why = causes.results[event]
            self._step(Reason(why), float(columns.ready[producer]))
            self._after(producer, Phase.completion)
        elif self._until in (Phase.data, Phase.completion) and causes.pool[event] >= 0:
            begin = float(columns.data_start[event])
            self._step(Reason.pool, begin)
            self._after(int(causes.pool[event]), Phase.data, begin)
            self._through(self._services(event, 2 * event + 1), Phase.data)
        else:
            reason, cause = Reason(int(causes.reason[event])), int(causes.event[event])
            loads = reason in _AFTER_A_LOAD and columns.table_load[event] >= 0.0
            self._step(reason, float((columns.table_load if loads else columns.start)[event]))
            if reason is Reason.shared:
                self._through(self._services(event, 2 * event), Phase.completion)
            else:
                self._after(cause, self._awaited(cause, reason))

    def _step(self, reason: Reason, enter_ns: float) -> None:
        stream = int(np.searchsorted(self._bases, self._at, side="right")) - 1
        event = self._at - self._bases[stream]
        self._steps.append(PathStep(stream, event, reason, enter_ns, self._until, self._served_ns))

    def _after(self, event: int, until: Phase | None, served_ns: float | None = None) -> None:
        self._at, self._until, self._served_ns = event, until, served_ns

    def _awaited(self, cause: int, reason: Reason) -> Phase | None:
        """The phase of an event with which a wait for it ends."""
        if reason is Reason.turn or (reason is Reason.destination and self._columns.on_dma[cause]):
            return self._finish(cause)
        return _ENDS_WITH.get(reason)

    def _finish(self, event: int) -> Phase:
        """The phase with which an event is finished: an engine may deliver a result before it is free."""
        return Phase.completion if self._columns.ready[event] >= self._columns.end[event] else Phase.issue

    def _services(self, event: int, key: int) -> list[Service]:
        """The DMAs that a wait names, numbered over all streams; none if it names no set."""
        moving = self._causes.moving.get(key)
        if moving is None:
            return []
        stream = int(np.searchsorted(self._bases, event, side="right")) - 1
        return moving.services(self._causes.queues[stream], self._bases[stream])

    def _through(self, services: Sequence[Service], until: Phase) -> None:
        """The path goes back through services, the last of which is waited for `until` a phase."""
        reason = Reason.engine if until is Phase.issue else Reason.pool
        for service in reversed(services[1:]):
            self._after(service.event, until, service.end_ns)
            self._step(reason, service.start_ns)
            until = Phase.issue if until is Phase.issue else Phase.data
        if services:
            self._after(services[0].event, until, services[0].end_ns)

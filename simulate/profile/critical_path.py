"""The chain of events that decides the length, cut into stretches of time that follow each other without a gap.

Each event of the chain holds it from the moment at which nothing before it delays it any more until the next
event takes over. So the stretches add up to the length, and each falls into phases: of an engine, of a DMA, of
a hand-over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan

from simulate.isa.plan import Phase
from simulate.profile.moments import Moments
from simulate.timing import Reason


@dataclass(frozen=True, slots=True)
class Stretch:
    """One event's part of the critical path.

    `event` is numbered over all streams; `reason` says why it starts no earlier. `phases` add up to
    `end_ns - start_ns`.
    """

    event: int
    reason: Reason
    start_ns: float
    end_ns: float
    phases: tuple[tuple[Phase, float], ...]

    @property
    def length_ns(self) -> float:
        """The part of the length that the event takes."""
        return self.end_ns - self.start_ns


def critical_path(moments: Moments) -> tuple[Stretch, ...]:
    """The critical path of a timeline, first event first."""
    timeline = moments.timeline
    steps = timeline.critical_path
    if not steps:
        return ()
    events = [timeline.bases[step.stream] + step.event for step in steps]
    enters: list[float] = []
    for event, step in zip(events, steps):
        if step.reason is Reason.pool:
            enters.append(moments.data_start[event])
        elif step.reason in (Reason.table_load, Reason.begin) and not isnan(moments.table_load[event]):
            enters.append(moments.table_load[event])
        else:
            enters.append(moments.start[event])
    leaves = [*enters[1:], timeline.length_ns]
    # Whoever waits for the DMA engines as a whole waits while they move data.
    moving = [step.reason is Reason.shared for step in steps[1:]] + [timeline.causes.last >= 0]
    return tuple(
        Stretch(event, step.reason, enter, leave, tuple(_phases(moments, event, enter, leave, shared)))
        for event, step, enter, leave, shared in zip(events, steps, enters, leaves, moving)
    )


def _phases(
    moments: Moments, event: int, enter: float, leave: float, shared: bool
) -> Iterator[tuple[Phase, float]]:
    at = enter
    for phase, until in _ends(moments, event):
        if shared and phase is Phase.data:
            until = leave
        end = min(until, leave)
        if end > at:
            yield phase, end - at
            at = end
    if leave > at:
        yield Phase.semaphore, leave - at


def _ends(moments: Moments, event: int) -> Iterator[tuple[Phase, float]]:
    yield Phase.table_load, moments.start[event]
    yield Phase.issue, moments.end[event]
    if not isnan(moments.data_start[event]):
        yield Phase.first_byte, moments.data_start[event]
        yield Phase.data, moments.data_end[event]
        yield Phase.completion, moments.ready[event]
    else:
        yield Phase.pipeline, moments.ready[event]

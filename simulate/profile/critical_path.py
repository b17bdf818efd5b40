"""The chain of events that decides the length, cut into stretches of time that follow each other without a gap.

Each event of the chain holds it from the moment at which nothing before it delays it any more until the next
event takes over. So the stretches add up to the length, and each falls into phases: of an engine, of a DMA, of
a hand-over. Where engines were waited for that do one thing after the other, each thing holds the chain for its
own time, which may come later than its slice: several DMA queues share the DMA engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan

from simulate.isa.plan import Phase
from simulate.profile.moments import Moments
from simulate.timing import PathStep, Reason


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
    leaves = [*(step.enter_ns for step in steps[1:]), timeline.length_ns]
    return tuple(
        Stretch(event, step.reason, step.enter_ns, leave, tuple(_phases(moments, event, step, leave)))
        for event, step, leave in zip((timeline.bases[s.stream] + s.event for s in steps), steps, leaves)
    )


def _phases(moments: Moments, event: int, step: PathStep, leave: float) -> Iterator[tuple[Phase, float]]:
    at = step.enter_ns
    for phase, until in _ends(moments, event, step, leave):
        end = min(until, leave)
        if end > at:
            yield phase, end - at
            at = end
        if phase is step.until:
            break
    if leave > at:
        yield Phase.semaphore, leave - at


def _ends(moments: Moments, event: int, step: PathStep, leave: float) -> Iterator[tuple[Phase, float]]:
    """The phases of an event that the next step may wait for, and when they end."""
    yield Phase.table_load, moments.start[event]
    if step.until is None:
        return
    in_turn = step.served_ns is not None
    if step.until is Phase.issue:
        yield Phase.issue, leave if in_turn else moments.end[event]
        return
    yield Phase.issue, min(moments.end[event], moments.ready[event])
    if isnan(moments.data_start[event]):
        yield Phase.pipeline, moments.ready[event]
        return
    yield Phase.first_byte, moments.data_start[event]
    if step.served_ns is None:
        yield Phase.data, moments.data_end[event]
        yield Phase.completion, moments.ready[event]
    else:
        # The last turn is waited for until its completion, another one until the next can begin.
        yield Phase.data, leave if step.until is Phase.data else step.served_ns
        yield Phase.completion, leave

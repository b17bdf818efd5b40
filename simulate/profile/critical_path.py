"""The critical path: the chain of events that decides the length, as stretches of time without gaps between them.

An event is an instruction or DMA of a launch. A stretch of an event begins when no earlier event delays it
any more, and ends when the next event of the path no longer waits for it. So the stretches add up to the
length. Each stretch is divided into phases: of an engine, of a DMA, or of a semaphore wait. Several DMA
queues share the DMA engines, which serve them in turn. Where the path waits for DMA engines, a DMA counts for
its service time, which may come later than its slice in the timeline.
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
    """The interval of the critical path that belongs to a single event.

    `event` is numbered over all streams; `reason` says why the event starts no earlier. `phases` are (phase,
    ns) in order of time and add up to `end_ns - start_ns`.
    """

    event: int
    reason: Reason
    start_ns: float
    end_ns: float
    phases: tuple[tuple[Phase, float], ...]

    @property
    def length_ns(self) -> float:
        """Length of the interval in ns."""
        return self.end_ns - self.start_ns


def find_critical_path(moments: Moments) -> tuple[Stretch, ...]:
    """Return the stretches of a timeline's critical path, first event first."""
    timeline = moments.timeline
    steps = timeline.critical_path
    leaves = [*(step.enter_ns for step in steps[1:]), timeline.length_ns]
    return tuple(
        Stretch(
            event, step.reason, step.enter_ns, leave, tuple(_split_into_phases(moments, event, step, leave))
        )
        for event, step, leave in zip((timeline.bases[s.stream] + s.event for s in steps), steps, leaves)
    )


def _split_into_phases(
    moments: Moments, event: int, step: PathStep, leave_ns: float
) -> Iterator[tuple[Phase, float]]:
    """Yield (phase, ns) of an event between `step.enter_ns` and `leave_ns`, in order of time, without empty phases.

    Time after the last phase that the next step waits for is a semaphore wait.

    Args:
        event: Number of the event over all streams.
        step: Step of the path: `until` is the phase of this event whose end the next step waits for.
        leave_ns: When the next step takes over.
    """
    now_ns = step.enter_ns
    for phase, phase_end_ns in _list_phase_ends(moments, event, step, leave_ns):
        end_ns = min(phase_end_ns, leave_ns)
        if end_ns > now_ns:
            yield phase, end_ns - now_ns
            now_ns = end_ns
        if phase is step.until:
            break
    if leave_ns > now_ns:
        yield Phase.semaphore, leave_ns - now_ns


def _list_phase_ends(
    moments: Moments, event: int, step: PathStep, leave_ns: float
) -> Iterator[tuple[Phase, float]]:
    """Yield (phase, end in ns) for the phases of an event that the next step may wait for, in order of time.

    Args:
        event: Number of the event over all streams.
        step: Step of the path: `until` is the phase that the next step waits for, `served_ns` the end of
            service by the DMA engines if these are shared.
        leave_ns: When the next step takes over. A phase that is served in turn ends there.
    """
    yield Phase.table_load, moments.start[event]
    if step.until is None:
        return
    in_turn = step.served_ns is not None
    if step.until is Phase.issue:
        yield Phase.issue, leave_ns if in_turn else moments.end[event]
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
        # The path waits for the last turn until it completes, and for earlier turns until the next can begin.
        yield Phase.data, leave_ns if step.until is Phase.data else step.served_ns
        yield Phase.completion, leave_ns

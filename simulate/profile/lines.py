"""Time by line of the kernel's source: what it holds of the engines, and what of the length waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

import numpy as np

from simulate.profile.critical_path import Stretch
from simulate.profile.moments import Moments, named


@dataclass(frozen=True, slots=True)
class LineTime:
    """One line of a kernel.

    `held_ns` adds up the slices of engines and DMA queues that its events hold, so lines together can exceed the
    length. `path_ns` is its part of the critical path; the lines' parts add up to the length.
    """

    line: tuple[CodeType, int]
    events: int
    held_ns: float
    path_ns: float


def lines(moments: Moments, path: Sequence[Stretch]) -> tuple[LineTime, ...]:
    """The lines with events, those that hold most of the critical path first, then those that hold most time."""
    timeline = moments.timeline
    order: dict[tuple[CodeType, int], int] = {}
    of_event = np.zeros(timeline.bases[-1], np.int64)
    for stream, base in zip(moments.streams, timeline.bases):
        numbers = np.array([order.setdefault(line, len(order)) for line in stream.lines], np.int64)
        ids = np.frombuffer(stream.line_ids, np.uint32) if len(stream) else np.zeros(0, np.uint32)
        of_event[base : base + len(stream)] = numbers[ids] if len(ids) else 0
    events = np.bincount(of_event, minlength=len(order))
    owner = of_event[np.array(timeline.bases)[timeline.stream] + timeline.event]
    held = np.bincount(owner, weights=timeline.end_ns - timeline.start_ns, minlength=len(order))
    waited = [0.0] * len(order)
    for stretch in path:
        waited[of_event[stretch.event]] += stretch.length_ns
    found = [
        LineTime(line, int(events[at]), float(held[at]), waited[at])
        for line, at in order.items()
        if events[at]
    ]
    return tuple(sorted(found, key=lambda each: (-each.path_ns, -each.held_ns, named(each.line))))

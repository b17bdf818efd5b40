"""Time by line of the kernel's source: the time it holds engines, and its part of the critical path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

import numpy as np
from numpy.typing import NDArray

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
    return tuple(sorted(found, key=_rank))


def calling_lines(moments: Moments, path: Sequence[Stretch]) -> tuple[LineTime, ...]:
    """Lines whose calls issue instructions, each with all of these; in the order of `lines`.

    Known where the launch was recorded with the lines of its callers. A line's events count once, also where it calls
    itself; `held_ns` and `path_ns` include those of the lines that it calls, so they do not add up over lines.
    """
    timeline = moments.timeline
    held = _by_event(moments)
    waited: dict[int, float] = {}
    for stretch in path:
        waited[stretch.event] = waited.get(stretch.event, 0.0) + stretch.length_ns
    sums: dict[tuple[CodeType, int], list[float]] = {}
    for stream, base in zip(moments.streams, timeline.bases):
        ids, chains = stream.chains()
        numbers = np.array(ids, np.int64)
        counts = np.bincount(numbers, minlength=len(chains))
        times = np.bincount(numbers, weights=held[base : base + len(stream)], minlength=len(chains))
        on_path = [0.0] * len(chains)
        for event in sorted(waited):
            if base <= event < base + len(stream):
                on_path[ids[event - base]] += waited[event]
        for chain, count, time, part in zip(chains, counts.tolist(), times.tolist(), on_path):
            for line in dict.fromkeys(chain[:-1]):
                entry = sums.setdefault(line, [0, 0.0, 0.0])
                entry[0] += count
                entry[1] += time
                entry[2] += part
    found = [LineTime(line, int(entry[0]), entry[1], entry[2]) for line, entry in sums.items()]
    return tuple(sorted(found, key=_rank))


def _by_event(moments: Moments) -> NDArray[np.float64]:
    """How long the slices of every event hold engines and DMA queues."""
    timeline = moments.timeline
    numbers = np.array(timeline.bases)[timeline.stream] + timeline.event
    held = np.zeros(timeline.bases[-1])
    np.add.at(held, numbers, timeline.end_ns - timeline.start_ns)
    return held


def _rank(each: LineTime) -> tuple[float, float, str]:
    return -each.path_ns, -each.held_ns, named(each.line)

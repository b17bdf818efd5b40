"""Time by line of the kernel's source: the time that it occupies engines, and its share of the critical path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

import numpy as np
from numpy.typing import NDArray

from simulate.profile.critical_path import Stretch
from simulate.profile.moments import Moments, format_line


@dataclass(frozen=True, slots=True)
class LineTime:
    """Time of a kernel line, given as (code object, line number).

    `events` counts the instructions that the line issued. `held_ns` adds up the time for which these occupy
    engines and DMA queues, so lines together can exceed the length of the launch. `path_ns` is the line's
    part of the critical path; these parts add up to the length.
    """

    line: tuple[CodeType, int]
    events: int
    held_ns: float
    path_ns: float


def sum_by_line(moments: Moments, path: Sequence[Stretch]) -> tuple[LineTime, ...]:
    """Return the time of every line that issued an instruction, in descending order of `path_ns`, then `held_ns`.

    Args:
        path: The critical path, as `find_critical_path` returns it.
    """
    timeline = moments.timeline
    order: dict[tuple[CodeType, int], int] = {}
    line_of_event = np.zeros(timeline.bases[-1], np.int64)
    for stream, base in zip(moments.streams, timeline.bases):
        numbers = np.array([order.setdefault(line, len(order)) for line in stream.lines], np.int64)
        ids = np.frombuffer(stream.line_ids, np.uint32) if len(stream) else np.zeros(0, np.uint32)
        line_of_event[base : base + len(stream)] = numbers[ids] if len(ids) else 0
    events = np.bincount(line_of_event, minlength=len(order))
    line_of_slice = line_of_event[np.array(timeline.bases)[timeline.stream] + timeline.event]
    held_ns = np.bincount(line_of_slice, weights=timeline.end_ns - timeline.start_ns, minlength=len(order))
    path_ns = [0.0] * len(order)
    for stretch in path:
        path_ns[line_of_event[stretch.event]] += stretch.length_ns
    line_times = [
        LineTime(line, int(events[index]), float(held_ns[index]), path_ns[index])
        for line, index in order.items()
        if events[index]
    ]
    return tuple(sorted(line_times, key=_make_sort_key))


def sum_by_calling_line(moments: Moments, path: Sequence[Stretch]) -> tuple[LineTime, ...]:
    """Return the time of lines that call other lines, each including its callees, in the order of `sum_by_line`.

    Empty unless the launch was recorded with call stacks. An event counts once for a line, even if the line
    calls itself. `held_ns` and `path_ns` include those of callees, so they do not add up over lines.

    Args:
        path: The critical path, as `find_critical_path` returns it.
    """
    timeline = moments.timeline
    held_ns = _sum_held_ns(moments)
    path_ns_by_event: dict[int, float] = {}
    for stretch in path:
        path_ns_by_event[stretch.event] = path_ns_by_event.get(stretch.event, 0.0) + stretch.length_ns
    sums: dict[tuple[CodeType, int], list[float]] = {}
    for stream, base in zip(moments.streams, timeline.bases):
        ids, chains = stream.chains()
        numbers = np.array(ids, np.int64)
        counts = np.bincount(numbers, minlength=len(chains))
        held_ns_by_chain = np.bincount(
            numbers, weights=held_ns[base : base + len(stream)], minlength=len(chains)
        )
        path_ns_by_chain = [0.0] * len(chains)
        for event in sorted(path_ns_by_event):
            if base <= event < base + len(stream):
                path_ns_by_chain[ids[event - base]] += path_ns_by_event[event]
        for chain, count, chain_held_ns, chain_path_ns in zip(
            chains, counts.tolist(), held_ns_by_chain.tolist(), path_ns_by_chain
        ):
            for line in dict.fromkeys(chain[:-1]):
                totals = sums.setdefault(line, [0, 0.0, 0.0])
                totals[0] += count
                totals[1] += chain_held_ns
                totals[2] += chain_path_ns
    line_times = [LineTime(line, int(totals[0]), totals[1], totals[2]) for line, totals in sums.items()]
    return tuple(sorted(line_times, key=_make_sort_key))


def _sum_held_ns(moments: Moments) -> NDArray[np.float64]:
    """Return for every event the ns for which it occupies engines and DMA queues.

    The array is float64, indexed by the number of the event over all streams.
    """
    timeline = moments.timeline
    numbers = np.array(timeline.bases)[timeline.stream] + timeline.event
    held_ns = np.zeros(timeline.bases[-1])
    np.add.at(held_ns, numbers, timeline.end_ns - timeline.start_ns)
    return held_ns


def _make_sort_key(line_time: LineTime) -> tuple[float, float, str]:
    """Return the sort key of a line: descending `path_ns`, then `held_ns`, then name."""
    return -line_time.path_ns, -line_time.held_ns, format_line(line_time.line)

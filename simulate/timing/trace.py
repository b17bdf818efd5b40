"""Traces in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A trace has a process for each core, a thread for each engine and DMA queue, and arrows between them for dependences
(`flows`). A queue whose data phases overlap, and a Tensor engine with matmuls side by side, get several threads of the
same name, because slices of a thread may not overlap. Instructions that take no time, which a compiler omits, are not
shown. Timestamps are microseconds with three decimals. Each line has one event, so traces can be compared as text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import Any

from nkw.files import complete
from simulate.lines import location
from simulate.run.run_order import as_streams
from simulate.run.stream import READ, Stream
from simulate.timing.dependences import Dependences, dependences
from simulate.timing.flows import EventSlices, SlicePosition, make_arrows
from simulate.timing.timeline import TRACKS, Slice, SliceKind, Timeline, format_core_label

_CATEGORIES = {
    SliceKind.table_load: "table load",
    SliceKind.instruction: "instruction",
    SliceKind.trigger: "DMA trigger",
    SliceKind.transfer: "DMA",
}
_KERNELS = "Kernels"
LANES_MAX = 1_000_000
"""Number of thread numbers that are reserved for one track."""


def write_trace(
    path: str | os.PathLike[str],
    launches: Sequence[tuple[str, Stream | Sequence[Stream], Timeline]],
    more: Iterable[dict[str, Any]] = (),
) -> None:
    """Write launches one after another as a trace.

    The file appears complete or not at all, and equal launches give equal bytes.

    Args:
        path: The file.
        launches: Label, streams and timeline of each launch; each begins where the launch before it ends.
        more: Further trace events, written after them as they are, for example of other processes.

    Raises:
        InvalidArgument: The file cannot be written.
    """
    with complete(path, "trace", "NKW-TRACE-PATH") as file:
        file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
        for number, event in enumerate(chain(_events(launches), more)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def _events(launches: Sequence[tuple[str, Stream | Sequence[Stream], Timeline]]) -> Iterator[dict[str, Any]]:
    """Yield the trace events of launches: names of processes and threads, slices, then arrows, launch by launch."""
    named: set[tuple[int, int]] = set()
    known: dict[int, Dependences] = {}  # by the identity of streams, which `launches` keeps alive
    offset = arrows = 0
    for label, launch_streams, timeline in launches:
        streams = as_streams(launch_streams)
        length = round(timeline.length_ns)
        processes = [stream.rank * 2 + stream.core + 1 for stream in streams]
        for number, process in enumerate(processes):
            if (process, 0) not in named:
                yield make_title_event(
                    "process_name", process, 0, format_core_label(streams, number) or "NeuronCore"
                )
            yield from make_thread_events(named, process, 0, _KERNELS)
            yield make_slice_event(label, "kernel", process, 0, offset, offset + length, {})
        event_slices = EventSlices(timeline.bases[-1])
        yield from _slices(streams, timeline, processes, offset, named, event_slices)
        if id(launch_streams) not in known:
            known[id(launch_streams)] = dependences(streams)
        for end in make_arrows(known[id(launch_streams)], event_slices, arrows):
            arrows = end["id"] + 1
            yield end
        offset += length


def _slices(
    streams: Sequence[Stream],
    timeline: Timeline,
    processes: Sequence[int],
    offset: int,
    named: set[tuple[int, int]],
    event_slices: EventSlices,
) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a launch's slices, in the order of start, each after the name of a new thread.

    Args:
        streams: The streams of the launch.
        timeline: Its timeline.
        processes: The process number of each stream.
        offset: The begin of the launch in the trace, in ns.
        named: The (process, thread) pairs that have a name already; new threads are added.
        event_slices: Receives the slices of every event, for the arrows.
    """
    lanes = [Lanes() for _ in timeline.tracks]
    number_of = {track: number for number, track in enumerate(timeline.tracks)}
    names = [_Names(stream) for stream in streams]
    labels = [format_core_label(streams, number) for number in range(len(streams))]
    for piece in timeline.by_start():
        if piece.slice_kind is SliceKind.instruction and piece.start_ns == piece.end_ns:
            continue
        start, end = offset + round(piece.start_ns), offset + round(piece.end_ns)
        lane = lanes[number_of[piece.track]].take(start, end)
        process = processes[piece.stream]
        short = piece.track.removeprefix(f"{labels[piece.stream]} ")
        thread = 1 + TRACKS.index(short) * LANES_MAX + lane
        yield from make_thread_events(named, process, thread, short)
        event, position = (
            timeline.bases[piece.stream] + piece.event,
            SlicePosition(process, thread, start, end),
        )
        if piece.slice_kind is SliceKind.transfer:
            event_slices.transfer(event, position)
        elif piece.slice_kind is not SliceKind.table_load:
            event_slices.instruction(event, position)
        called = names[piece.stream]
        yield make_slice_event(*called.title(piece), process, thread, start, end, called.details(piece))


class Lanes:
    """Threads of one track, numbered from 0: a slice takes the first thread on which all earlier slices have ended."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # heap of (end, lane)
        self._free: list[int] = []  # heap of lanes
        self._count = 0

    def take(self, start: int, end: int) -> int:
        """Return the number of the thread for a slice from `start` to `end` ns, and occupy the thread until `end`.

        Slices must be passed in order of start.
        """
        while self._taken and self._taken[0][0] <= start:
            heappush(self._free, heappop(self._taken)[1])
        if self._free:
            lane = heappop(self._free)
        else:
            lane, self._count = self._count, self._count + 1
        heappush(self._taken, (end, lane))
        return lane


class _Names:
    """Titles and details of the slices of one stream; names of source lines are computed once."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.lines = [f"{where.file}:{where.line}" for where in map(location, stream.lines)]

    def title(self, piece: Slice) -> tuple[str, str]:
        """Return name and category of a slice: the instruction's `name=` or its operation, or the loaded table."""
        stream = self.stream
        name = stream.names.get(piece.event) or stream.op_names[stream.ops[piece.event]]
        if piece.slice_kind is SliceKind.table_load:
            name = f"load table {stream.costs[stream.cost_ids[piece.event]].table}"
        return name, _CATEGORIES[piece.slice_kind]

    def details(self, piece: Slice) -> dict[str, Any]:
        """Return the "args" of a slice, which a viewer shows when the slice is selected: operands, line, cost."""
        stream, event = self.stream, piece.event
        cost = stream.costs[stream.cost_ids[event]]
        names = [(access.mode, stream.tensors[access.tensor].name) for access in stream.accesses(event)]
        details: dict[str, Any] = {
            "event": event,
            "op": stream.op_names[stream.ops[event]],
            "line": self.lines[stream.line_ids[event]],
            "reads": " ".join(name for mode, name in names if mode == READ),
            "writes": " ".join(name for mode, name in names if mode != READ),
            "ready_us": round(piece.ready_ns) / 1000,
        }
        if cost.dma is not None:
            details["bytes"] = cost.dma.bytes
            details["descriptors"] = cost.dma.descriptors
        else:
            details["interval_cycles"] = round(cost.interval_cycles, 3)
            details["latency_cycles"] = round(cost.latency_cycles, 3)
        return details


def make_slice_event(
    name: str, category: str, process: int, thread: int, start: int, end: int, details: dict[str, Any]
) -> dict[str, Any]:
    """Return the trace event of a slice from `start` to `end`, given in ns, with `details` as its "args"."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": details,
    }


def make_title_event(title_type: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """Return the trace event that names a process or a thread.

    Args:
        title_type: "process_name" or "thread_name".
        process: The number of the process.
        thread: The number of the thread; 0 if a process is named.
        name: The name.
    """
    return {"name": title_type, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def make_thread_events(
    named: set[tuple[int, int]], process: int, thread: int, name: str
) -> Iterator[dict[str, Any]]:
    """Yield the two trace events with the name and the order of a thread; none if it is in `named`.

    Args:
        named: The (process, thread) pairs that have a name, to which this thread is added.
        process: The number of the process.
        thread: The number of the thread, by which a viewer sorts threads.
        name: The name of the thread.
    """
    if (process, thread) in named:
        return
    named.add((process, thread))
    yield make_title_event("thread_name", process, thread, name)
    yield {
        "name": "thread_sort_index",
        "ph": "M",
        "pid": process,
        "tid": thread,
        "args": {"sort_index": thread},
    }

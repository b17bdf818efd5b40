"""Times of every event of a timeline, by its number over all streams, and the names that reports give to events.

An event is an instruction or DMA of a launch. A slice is an interval in which an event occupies a track: an
engine, or a DMA queue.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from linecache import checkcache, getline
from types import CodeType

import numpy as np
from numpy.typing import NDArray

from simulate.lines import find_assigned, location
from simulate.run.stream import Access, Stream
from simulate.timing import SliceKind, Timeline


@dataclass(frozen=True, eq=False)
class Moments:
    """Times by event, as lists: its start, release of its engine, readiness, table load and data phase.

    Event i of stream s has the number `timeline.bases[s] + i`, the index into every list. Times are in ns;
    NaN means that an event has no such phase.
    """

    streams: tuple[Stream, ...]
    timeline: Timeline

    @cached_property
    def _is_event_slice(self) -> NDArray[np.bool_]:
        """Mask of the timeline's slices that are instructions or DMA triggers: a slice for every event."""
        slice_kinds = self.timeline.slice_kind
        return (slice_kinds == SliceKind.instruction) | (slice_kinds == SliceKind.trigger)

    @cached_property
    def start(self) -> list[float]:
        """Time at which each event starts on its engine, in ns; for a DMA, on the engine that triggers it."""
        return self.timeline.start_ns[self._is_event_slice].tolist()  # type: ignore[no-any-return]

    @cached_property
    def end(self) -> list[float]:
        """Time at which the engine of each event is free again, in ns.

        For a DMA, the engine that triggers it.
        """
        return self.timeline.end_ns[self._is_event_slice].tolist()  # type: ignore[no-any-return]

    @cached_property
    def ready(self) -> list[float]:
        """Time at which the output of each event can be used by other events, in ns."""
        return self.timeline.ready_ns[self._is_event_slice].tolist()  # type: ignore[no-any-return]

    @cached_property
    def table_load(self) -> list[float]:
        """Start of the activation table load before each event, in ns, or NaN without a load."""
        return self._column_by_event(SliceKind.table_load, self.timeline.start_ns)

    @cached_property
    def data_start(self) -> list[float]:
        """Time at which the first bytes of each DMA move, in ns, or NaN for other instructions."""
        return self._column_by_event(SliceKind.transfer, self.timeline.start_ns)

    @cached_property
    def data_end(self) -> list[float]:
        """Time at which the last bytes of each DMA have moved, in ns, or NaN for other instructions."""
        return self._column_by_event(SliceKind.transfer, self.timeline.end_ns)

    def _column_by_event(self, slice_kind: SliceKind, column: NDArray[np.float64]) -> list[float]:
        """Return a column of the timeline for slices of a kind, by event; NaN for events without such a slice.

        Args:
            column: A time in ns for each slice of the timeline.
        """
        timeline = self.timeline
        times_ns = np.full(timeline.bases[-1], np.nan)
        rows = np.flatnonzero(timeline.slice_kind == slice_kind)
        times_ns[np.array(timeline.bases)[timeline.stream[rows]] + timeline.event[rows]] = column[rows]
        return times_ns.tolist()  # type: ignore[no-any-return]

    def stream_number(self, event: int) -> int:
        """Return the index of the stream that contains an event, given its number over all streams."""
        return bisect_right(self.timeline.bases, event) - 1

    def stream_of(self, event: int) -> tuple[Stream, int]:
        """Return (stream, index in the stream) of an event, given its number over all streams."""
        index = self.stream_number(event)
        return self.streams[index], event - self.timeline.bases[index]

    def track(self, event: int) -> str:
        """Return the name of the engine or DMA queue that produces an event's output: the DMA queue of a DMA."""
        return self._tracks[event]

    @cached_property
    def _tracks(self) -> list[str]:
        """Name of the engine or DMA queue that produces the output of each event, by number of the event."""
        timeline = self.timeline
        track_ids = np.zeros(timeline.bases[-1], np.int64)
        events = np.array(timeline.bases)[timeline.stream] + timeline.event
        for slice_kind in (SliceKind.instruction, SliceKind.trigger, SliceKind.transfer):
            rows = timeline.slice_kind == slice_kind
            track_ids[events[rows]] = timeline.track[rows]
        return [timeline.tracks[track] for track in track_ids.tolist()]

    def op(self, event: int) -> str:
        """Return the name of an event's instruction, such as "nc_matmul"."""
        stream, index = self.stream_of(event)
        return stream.op_names[stream.ops[index]]

    def line(self, event: int) -> tuple[CodeType, int]:
        """Return the kernel line that issued an event, as (code object, line number)."""
        stream, index = self.stream_of(event)
        return stream.lines[stream.line_ids[index]]

    def accesses(self, event: int) -> tuple[Access, ...]:
        """Return the operands of an event, as accesses to boxes of tensors."""
        stream, index = self.stream_of(event)
        return stream.accesses(index)


def format_line(line: tuple[CodeType, int]) -> str:
    """Return a line's name in reports, such as `kernel.py:12`, with as much of the path as `location` gives."""
    source_location = location(line)
    return f"{source_location.file}:{source_location.line}"


def read_source_line(line: tuple[CodeType, int]) -> str:
    """Return the source text of a line in its file now, stripped.

    An empty string if the file cannot be read.
    """
    checkcache(line[0].co_filename)
    return getline(line[0].co_filename, line[1]).strip()


def format_tensor(streams: Sequence[Stream], stream: int, serial: int) -> str:
    """Return a tensor's name in reports.

    The name of a tensor that no variable was assigned to is followed by the line that allocates it.

    Args:
        stream: Index of the stream.
        serial: Index of the tensor in the stream.
    """
    record = streams[stream].tensors[serial]
    if record.line is None or record.explicit_name or find_assigned(record.line):
        return record.name
    return f"{record.name} of {format_line(record.line)}"

"""The moments of every event of a timeline, by its number over all streams, and what it is called in reports."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from linecache import checkcache, getline
from types import CodeType

import numpy as np
from numpy.typing import NDArray

from simulate.lines import assigned, location
from simulate.run.stream import Access, Stream
from simulate.timing import SliceKind, Timeline


@dataclass(frozen=True, eq=False)
class Moments:
    """Columns by event: when it starts, frees its engine, is ready; its table load and its data phase, or NaN.

    Event i of stream s has the number `timeline.bases[s] + i`.
    """

    streams: tuple[Stream, ...]
    timeline: Timeline

    @cached_property
    def _own(self) -> NDArray[np.bool_]:
        kind = self.timeline.kind
        return (kind == SliceKind.instruction) | (kind == SliceKind.trigger)

    @cached_property
    def start(self) -> list[float]:
        """When each event starts on its engine, in ns."""
        return self.timeline.start_ns[self._own].tolist()  # type: ignore[no-any-return]

    @cached_property
    def end(self) -> list[float]:
        """When its engine is free."""
        return self.timeline.end_ns[self._own].tolist()  # type: ignore[no-any-return]

    @cached_property
    def ready(self) -> list[float]:
        """When its result is usable."""
        return self.timeline.ready_ns[self._own].tolist()  # type: ignore[no-any-return]

    @cached_property
    def table_load(self) -> list[float]:
        """When the table load before it begins."""
        return self._of(SliceKind.table_load, self.timeline.start_ns)

    @cached_property
    def data_start(self) -> list[float]:
        """When its first bytes move."""
        return self._of(SliceKind.transfer, self.timeline.start_ns)

    @cached_property
    def data_end(self) -> list[float]:
        """When its last bytes have moved."""
        return self._of(SliceKind.transfer, self.timeline.end_ns)

    def _of(self, kind: SliceKind, column: NDArray[np.float64]) -> list[float]:
        timeline = self.timeline
        found = np.full(timeline.bases[-1], np.nan)
        rows = np.flatnonzero(timeline.kind == kind)
        found[np.array(timeline.bases)[timeline.stream[rows]] + timeline.event[rows]] = column[rows]
        return found.tolist()  # type: ignore[no-any-return]

    def stream_number(self, number: int) -> int:
        """The number of the stream that an event is in."""
        return bisect_right(self.timeline.bases, number) - 1

    def stream_of(self, number: int) -> tuple[Stream, int]:
        """The stream and the index in it of an event."""
        at = self.stream_number(number)
        return self.streams[at], number - self.timeline.bases[at]

    def track(self, number: int) -> str:
        """The track that an event's result comes from: the DMA queue of a DMA, else its engine."""
        return self._tracks[number]

    @cached_property
    def _tracks(self) -> list[str]:
        timeline = self.timeline
        found = np.zeros(timeline.bases[-1], np.int64)
        numbers = np.array(timeline.bases)[timeline.stream] + timeline.event
        for kind in (SliceKind.instruction, SliceKind.trigger, SliceKind.transfer):
            rows = timeline.kind == kind
            found[numbers[rows]] = timeline.track[rows]
        return [timeline.tracks[track] for track in found.tolist()]

    def op(self, number: int) -> str:
        """The instruction's name."""
        stream, index = self.stream_of(number)
        return stream.op_names[stream.ops[index]]

    def line(self, number: int) -> tuple[CodeType, int]:
        """The kernel line that issued an event."""
        stream, index = self.stream_of(number)
        return stream.lines[stream.line_ids[index]]

    def accesses(self, number: int) -> tuple[Access, ...]:
        """The operands of an event."""
        stream, index = self.stream_of(number)
        return stream.accesses(index)


def named(line: tuple[CodeType, int]) -> str:
    """A line as reports name it: `kernel.py:12`, with as much of the path as `location` gives."""
    where = location(line)
    return f"{where.file}:{where.line}"


def source(line: tuple[CodeType, int]) -> str:
    """The text of a line; empty where its file is not to be read. A file may have changed since it was read."""
    checkcache(line[0].co_filename)
    return getline(line[0].co_filename, line[1]).strip()


def tensor_label(streams: Sequence[Stream], stream: int, serial: int) -> str:
    """A tensor by its name, a nameless one with the line that allocates it."""
    record = streams[stream].tensors[serial]
    if record.line is None or record.given or assigned(record.line):
        return record.name
    return f"{record.name} of {named(record.line)}"

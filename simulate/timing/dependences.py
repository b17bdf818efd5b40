"""Which event must wait for which: worked out from the boxes that events read and write.

Two events conflict where they touch a common byte of one tensor and at least one writes. Serial numbers
belong to a rank, so its cores meet only in shared HBM. Boxes enclose what an access pattern touches, which
can overstate: rows that two patterns interleave conflict although no byte is common, like the compiler's
tracking per tensor.

An engine's registers and random generators are no tensors; an instruction that uses one depends on the last that did.

Kept are the dependences on the last writer and on the reads since. Of the reads of one engine the last is
enough, because an engine reads in program order (the dataflow reading, which has no engines, may overwrite a
place before an earlier read: it is a lower bound); DMAs of one queue overlap, so each of them counts. Where engines
leave program order, every read counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from simulate.errors import InvalidArgument
from simulate.isa.enums import Engine
from simulate.isa.plan import State
from simulate.run.boxes import Boxes
from simulate.run.run_order import Segment, as_streams, run_order
from simulate.run.stream import READ, Stream
from simulate.timing.scheduled import WINDOW

_UNREAD: dict[int, int] = {}  # of every place without a read since its last write; never filled


class Wait(IntEnum):
    """Until when an event waits for another one.

    result: until its result is usable (read after write, write after write, a requested order).
    read: until it has read its operands (write after read). An engine has when its issue interval is over, a
    DMA or a collective when it is complete, since only its completion tells.
    issue: until its issue interval is over, and the later result is ready no earlier than the first. This is
    enough between writes of one engine, whose pipeline delivers in order ("each stream is issued and
    completed in order"), and between matmuls that accumulate into one place: the Tensor engine adds as the
    columns arrive in PSUM, and traces show back-to-back accumulation at the full issue rate.
    start: until it starts, because what it found free is free (`simulate.timing.rotation`).
    """

    result = 0
    read = 1
    issue = 2
    start = 3


_RESULT, _READ = int(Wait.result), int(Wait.read)  # plain numbers add up faster


@dataclass(frozen=True)
class Dependences:
    """For every event, the events it waits for.

    Events of all streams are numbered through: event i of stream s is `bases[s] + i`. `before[event]` holds
    producer * 4 + Wait for each dependence. `every_read`: they hold in whatever order engines take their events.
    `uses` tells with which events the use of a tensor begins and ends.
    """

    bases: tuple[int, ...]
    order: tuple[Segment, ...]
    before: list[tuple[int, ...]]
    every_read: bool
    uses: Uses

    def of(self, event: int) -> Iterator[tuple[int, Wait]]:
        """The (producer, Wait) pairs of one event."""
        return ((packed >> 2, Wait(packed & 3)) for packed in self.before[event])


def dependences(streams: Stream | Sequence[Stream], every_read: bool = False) -> Dependences:
    """The dependences among the events of `streams`; `every_read` if engines may leave program order.

    Raises InvalidArgument for a requested order, or for rendezvous, that cannot be kept.
    """
    streams = as_streams(streams)
    bases = tuple(int(base) for base in np.cumsum([0, *map(len, streams)]))
    order = run_order(streams)
    tracker = _Tracker(streams, bases, every_read)
    for step in order:
        if step.rendezvous:
            # Members act at the same time: none of them sees the others' effects.
            found = [tracker.waits(stream, event) for stream, event, _ in step.members]
            for (stream, event, _), waits in zip(step.members, found):
                tracker.before[bases[stream] + event] = waits
                tracker.remember(stream, event)
            continue
        for stream, first, end in step.members:
            tracker.run(stream, first, end)
    _add_states(streams, bases, tracker.before)
    _add_requested(streams, bases, tracker.before)
    return Dependences(bases, order, tracker.before, every_read, Uses(tracker))


class Uses:
    """The events with which the use of a tensor begins and ends, as far as no dependence among its users says so."""

    def __init__(self, tracker: _Tracker) -> None:
        self._boxes = tracker.boxes
        self._writer = tracker.writer
        self._readers = tracker.readers
        self._roots = tracker.roots
        self._lane_of = tracker.lane_of
        self._kept = WINDOW if tracker.every_read else 1
        self._last: dict[tuple[int, int], list[int]] = {}

    def first(self, stream: int, tensor: int) -> list[int]:
        """The writers of a tensor of a stream that wait for no earlier one."""
        cells = self._boxes.of(stream, tensor)
        return sorted({event for cell in cells for event in self._roots.get(cell, ())})

    def last(self, stream: int, tensor: int) -> list[int]:
        """The last writers and the reads since, as `Dependences.before` would hold them for who writes it next.

        Of the reads of an engine the last is enough in program order, and otherwise the last of a window: one further
        back starts before.
        """
        known = self._last.get((stream, tensor))
        if known is not None:
            return known
        writers: set[int] = set()
        readers: dict[int, set[int]] = {}
        for cell in self._boxes.of(stream, tensor):
            if self._writer[cell] >= 0:
                writers.add(self._writer[cell])
            for reader in self._readers[cell].values():
                lane = self._lane_of[reader]
                if lane in readers:
                    readers[lane].add(reader)
                else:
                    readers[lane] = {reader}
        found = [writer * 4 + _RESULT for writer in sorted(writers)]
        for lane, events in readers.items():
            kept = sorted(events) if lane < 0 else sorted(events)[-self._kept :]
            found += [event * 4 + _READ for event in kept]
        self._last[stream, tensor] = found
        return found


class _Tracker:
    """The last writer and the reads since, of every distinct box."""

    def __init__(self, streams: tuple[Stream, ...], bases: tuple[int, ...], every_read: bool) -> None:
        self.bases = bases
        self.every_read = every_read
        self.before: list[tuple[int, ...]] = [()] * bases[-1]
        self.boxes = boxes = Boxes(streams)
        self.cells = boxes.cells
        self.kinds = boxes.kinds
        self.ends = boxes.ends
        self.near = boxes.near
        self.writer = [-1] * len(boxes.near)
        self.readers: list[dict[int, int]] = [_UNREAD] * len(boxes.near)
        self.roots: dict[int, list[int]] = {}  # by cell, the writes that follow none
        # What an event is ordered with: its engine, or nothing but itself for what runs on the DMA engines.
        self.lanes = [
            [-1 if engine == Engine.dma.value else number * 8 + engine for engine in stream.engines]
            for number, stream in enumerate(streams)
        ]
        self.lane_of: list[int] = [lane for lanes in self.lanes for lane in lanes]

    def run(self, stream: int, first: int, end: int) -> None:
        base, before = self.bases[stream], self.before
        for event in range(first, end):
            before[base + event] = self.waits(stream, event)
            self.remember(stream, event)

    def waits(self, stream: int, event: int) -> tuple[int, ...]:
        """What an event waits for."""
        cells, kinds, ends = self.cells[stream], self.kinds[stream], self.ends[stream]
        writer, near, lane_of = self.writer, self.near, self.lane_of
        lane = self.lanes[stream][event]
        found: list[int] = []
        for at in range(ends[event - 1] if event else 0, ends[event]):
            cell = cells[at]
            if cell < 0:
                continue
            if kinds[at] == READ:
                last = writer[cell]
                if last >= 0:
                    found.append(last * 4)
                for other, _ in near[cell]:
                    last = writer[other]
                    if last >= 0:
                        found.append(last * 4)
                continue
            known = len(found)
            self._before_write(cell, lane, lane_of, found)
            for other, _ in near[cell]:
                self._before_write(other, lane, lane_of, found)
            if len(found) == known:
                self.roots.setdefault(cell, []).append(self.bases[stream] + event)
        if len(found) > 1:
            return tuple(dict.fromkeys(found))
        return tuple(found)

    def _before_write(self, cell: int, lane: int, lane_of: list[int], found: list[int]) -> None:
        last = self.writer[cell]
        if last >= 0:
            in_order = lane >= 0 and lane_of[last] == lane
            found.append(last * 4 + (2 if in_order else 0))
        readers = self.readers[cell]
        if readers:
            found.extend([reader * 4 + 1 for reader in readers.values()])

    def remember(self, stream: int, event: int) -> None:
        """Note what an event has read and written."""
        cells, kinds, ends = self.cells[stream], self.kinds[stream], self.ends[stream]
        this = self.bases[stream] + event
        start, end = ends[event - 1] if event else 0, ends[event]
        for at in range(start, end):
            cell = cells[at]
            if cell < 0 or kinds[at] == READ:
                continue
            self.writer[cell] = this
            self.readers[cell] = _UNREAD
            for other, covered in self.near[cell]:
                if covered:
                    self.writer[other] = -1
                    self.readers[other] = _UNREAD
        lane = self.lanes[stream][event]
        key = lane if lane >= 0 and not self.every_read else -1 - this
        for at in range(start, end):
            if kinds[at] == READ and cells[at] >= 0:
                if self.readers[cells[at]]:
                    self.readers[cells[at]][key] = this
                else:
                    self.readers[cells[at]] = {key: this}


def _add_states(streams: tuple[Stream, ...], bases: tuple[int, ...], before: list[tuple[int, ...]]) -> None:
    """Registers and random generators of an engine: who uses them comes after who used them last.

    They are one engine's, whose pipeline hands them on in order.
    """
    for stream, base in zip(streams, bases):
        last: dict[State, int] = {}
        for event, state in stream.states.items():
            if state in last:
                before[base + event] += ((base + last[state]) * 4 + Wait.issue,)
            last[state] = event


def _add_requested(
    streams: tuple[Stream, ...], bases: tuple[int, ...], before: list[tuple[int, ...]]
) -> None:
    for stream, base in zip(streams, bases):
        for producer, consumer in stream.requested:
            if producer >= consumer:
                raise InvalidArgument(
                    "NKW-TIMING-ORDER",
                    f"event {consumer} ({stream.event(consumer).where}) depends_on event {producer}, which "
                    "is issued later; call depends_on on the later instruction",
                )
            edge = (base + producer) * 4 + Wait.result
            if edge not in before[base + consumer]:
                before[base + consumer] += (edge,)

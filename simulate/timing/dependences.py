"""Dependences: which event must wait for which, because of the boxes that events read and write.

Two events conflict where they touch a common byte of one tensor and at least one of them writes. Serial numbers of
tensors belong to a rank, so the cores of a rank share tensors in shared HBM only. A box encloses what an access pattern
touches, so dependences can be overstated: interleaved rows of two patterns conflict although they share no byte. The
compiler's tracking per tensor overstates as well.

Registers and random generators of an engine are no tensors. An instruction that uses one depends on its last user.

An event depends on the last writer of a box and on the reads since. Of the reads of one engine the last one is enough,
because an engine reads in program order. The dataflow reading has no engines and may overwrite a box before an earlier
read: it is a lower bound. DMAs of one queue overlap, so each of them counts. Where engines leave program order, every
read counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from nkw.errors import InvalidArgument
from simulate.isa.enums import Engine
from simulate.isa.plan import State
from simulate.run.boxes import Boxes
from simulate.run.run_order import Segment, as_streams, merge_segments
from simulate.run.stream import Stream
from simulate.timing.readings import WINDOW
from simulate.timing.timeline import IntColumn

_UNREAD: dict[int, int] = {}  # of every cell without a read since its last write; never filled


class Wait(IntEnum):
    """Until when an event waits for another one.

    result: until its result is usable (read after write, write after write, a requested order).
    read: until it has read its operands (write after read). An engine has read them at the end of its issue interval, a
    DMA or a collective when it is complete.
    issue: until its issue interval is over; the later result is ready no earlier than the first. This is enough between
    writes of one engine, whose pipeline delivers in order ("each stream is issued and completed in order"). It is also
    enough between matmuls that accumulate into one tile: the Tensor engine adds as the columns arrive in PSUM, and
    traces show back-to-back accumulation at the full issue rate.
    start: until it starts, because both write a tile whose bytes the other one has waited for (`rotation`).
    """

    result = 0
    read = 1
    issue = 2
    start = 3


_RESULT, _READ, _ISSUE = int(Wait.result), int(Wait.read), int(Wait.issue)  # plain integers add faster


@dataclass(frozen=True)
class Dependences:
    """For every event, the events it waits for.

    Events of all streams are numbered through: event i of stream s is `bases[s] + i`. A dependence is the number
    producer * 4 + Wait; those of an event are at `ends[event] : ends[event + 1]` of `packed`. `every_read`: they hold
    in whatever order engines take their events. `uses` tells with which events the use of a tensor begins and ends.
    `with_room` has these and the waits for room (`rotation`), by the sizes of the memories, once they are known.
    """

    bases: tuple[int, ...]
    order: tuple[Segment, ...]
    packed: IntColumn
    ends: IntColumn
    every_read: bool
    uses: Uses
    with_room: dict[tuple[int, ...], Dependences] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def of(self, event: int) -> Iterator[tuple[int, Wait]]:
        """The (producer, Wait) pairs of one event."""
        found = self.packed[self.ends[event] : self.ends[event + 1]]
        return ((number >> 2, Wait(number & 3)) for number in found.tolist())

    @property
    def owners(self) -> IntColumn:
        """The event that each dependence belongs to."""
        return np.repeat(np.arange(len(self.ends) - 1), np.diff(self.ends))

    def and_more(self, owners: Sequence[int], packed: Sequence[int]) -> Dependences:
        """These dependences and, after them, others of the events `owners`."""
        if not owners:
            return self
        owned, all_packed = np.append(self.owners, owners), np.append(self.packed, packed)
        ordered, ends = _by_owner(owned, all_packed, len(self.ends) - 1)
        return replace(self, packed=ordered, ends=ends)


def _by_owner(owners: IntColumn, packed: IntColumn, events: int) -> tuple[IntColumn, IntColumn]:
    """Dependences in the order of the events that they belong to, and where those of each event end."""
    ends = np.append(0, np.cumsum(np.bincount(owners, minlength=events)))
    return packed[np.argsort(owners, kind="stable")], ends


def dependences(streams: Stream | Sequence[Stream], every_read: bool = False) -> Dependences:
    """The dependences among the events of `streams`; `every_read` if engines may leave program order.

    Raises InvalidArgument for a requested order, or for rendezvous, that cannot be kept.
    """
    streams = as_streams(streams)
    bases = tuple(int(base) for base in np.cumsum([0, *map(len, streams)]))
    order = merge_segments(streams)
    tracker = _Tracker(streams, every_read)
    for step in order:
        for stream, first, end in step.members:
            tracker.run(bases[stream] + first, bases[stream] + end, remembered=not step.is_rendezvous)
        if step.is_rendezvous:
            # Members act at the same time: none of them sees the others' effects.
            for stream, event, _ in step.members:
                tracker.remember(bases[stream] + event)
    packed, ends = np.array(tracker.found, np.int64), np.array([0, *tracker.ends], np.int64)
    if len(streams) > 1:
        owners = np.repeat(np.array(tracker.events, np.int64), np.diff(ends))
        packed, ends = _by_owner(owners, packed, bases[-1])
    found = Dependences(bases, order, packed, ends, every_read, Uses(tracker))
    found = found.and_more(*_states(streams, bases))
    found = found.and_more(*_iterations(streams, bases))
    return found.and_more(*_requested(streams, found))


class Uses:
    """The first writers and the last users of each tensor."""

    def __init__(self, tracker: _Tracker) -> None:
        self._tracker = tracker
        self._kept = WINDOW if tracker.every_read else 1
        self._last: dict[tuple[int, int], tuple[int, ...]] = {}

    def first(self, stream: int, tensor: int) -> list[int]:
        """The writers of a tensor of a stream that wait for no earlier one."""
        cells = self._tracker.boxes.cells_in(stream, tensor)
        return sorted({event for cell in cells for event in self._tracker.roots.get(cell, ())})

    def last(self, stream: int, tensor: int) -> tuple[int, ...]:
        """The last writers and the reads since, as dependences of who writes it next.

        Of the reads of an engine the last is enough in program order, and otherwise the last of a window: one further
        back starts before.
        """
        known = self._last.get((stream, tensor))
        if known is not None:
            return known
        tracker, lane_of = self._tracker, self._tracker.lane_of
        writers: set[int] = set()
        readers: dict[int, set[int]] = {}
        for cell in tracker.boxes.cells_in(stream, tensor):
            if tracker.writer[cell] >= 0:
                writers.add(tracker.writer[cell])
            for read in tracker.readers[cell].values():
                lane = lane_of[read >> 2]
                if lane in readers:
                    readers[lane].add(read)
                else:
                    readers[lane] = {read}
        found = sorted(writers)
        for lane, reads in readers.items():
            found += sorted(reads) if lane < 0 else sorted(reads)[-self._kept :]
        known = self._last[stream, tensor] = tuple(found)
        return known


class _Tracker:
    """The last writer and the reads since, of every distinct box."""

    def __init__(self, streams: tuple[Stream, ...], every_read: bool) -> None:
        self.every_read = every_read
        # The events in the order in which they were told, and what they wait for, which ends at `ends`.
        self.events: list[int] = []
        self.found: list[int] = []
        self.ends: list[int] = []
        self.boxes = boxes = Boxes(streams)
        # Of every cell the last writer and the reads since that count, as dependences of who writes it next. Dicts of
        # numbers, unlike lists, do not burden the garbage collector.
        self.writer = [-1] * len(boxes.near)
        self.readers = [_UNREAD] * len(boxes.near)
        self.roots: dict[int, tuple[int, ...]] = {}  # by cell, the writes that follow none
        # What an event is ordered with: its engine, or nothing but itself for what runs on the DMA engines.
        self.lane_of: list[int] = [
            -1 if engine == Engine.dma.value else number * 8 + engine
            for number, stream in enumerate(streams)
            for engine in stream.engines
        ]
        # The operands of event e are at starts[e] : starts[e + 1] of `accesses`, each cell * 2 + whether it is written.
        self.accesses, self.starts = boxes.accesses()

    def run(self, first: int, end: int, remembered: bool) -> None:
        """Find what events wait for, one after the other; and, if it is `remembered`, who waits for them."""
        accesses, starts, lane_of = self.accesses, self.starts, self.lane_of
        found, writer, near = self.found, self.writer, self.boxes.near
        before_write = self._before_write
        for event in range(first, end):
            known = len(found)
            for access in accesses[starts[event] : starts[event + 1]]:
                cell = access >> 1
                if access & 1:
                    so_far = len(found)
                    before_write(cell, lane_of[event])
                    for other, _ in near[cell]:
                        before_write(other, lane_of[event])
                    if len(found) == so_far:
                        self.roots[cell] = (*self.roots.get(cell, ()), event)
                    continue
                if writer[cell] >= 0:
                    found.append(writer[cell])
                for other, _ in near[cell]:
                    if writer[other] >= 0:
                        found.append(writer[other])
            if len(found) > known + 1:
                found[known:] = dict.fromkeys(found[known:])
            self.events.append(event)
            self.ends.append(len(found))
            if remembered:
                self.remember(event)

    def _before_write(self, cell: int, lane: int) -> None:
        """What a write into a cell by an event of a lane waits for."""
        last = self.writer[cell]
        if last >= 0:
            in_order = lane >= 0 and self.lane_of[last >> 2] == lane
            self.found.append(last + _ISSUE if in_order else last)
        if self.readers[cell]:
            self.found += self.readers[cell].values()

    def remember(self, event: int) -> None:
        """Note what an event has read and written."""
        writer, readers, near = self.writer, self.readers, self.boxes.near
        operands = self.accesses[self.starts[event] : self.starts[event + 1]]
        for access in operands:
            if access & 1:
                cell = access >> 1
                writer[cell] = event * 4 + _RESULT
                readers[cell] = _UNREAD
                for other, covered in near[cell]:
                    if covered:
                        writer[other] = -1
                        readers[other] = _UNREAD
        lane = self.lane_of[event]
        key = lane if lane >= 0 and not self.every_read else -1 - event
        for access in operands:
            if not access & 1:
                cell = access >> 1
                if readers[cell]:
                    readers[cell][key] = event * 4 + _READ
                else:
                    readers[cell] = {key: event * 4 + _READ}


def _states(streams: tuple[Stream, ...], bases: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Registers and random generators of an engine: who uses them comes after who used them last.

    They are one engine's, whose pipeline hands them on in order.
    """
    owners, packed = [], []
    for stream, base in zip(streams, bases):
        last: dict[State, int] = {}
        for event, state in stream.states.items():
            if state in last:
                owners.append(base + event)
                packed.append((base + last[state]) * 4 + Wait.issue)
            last[state] = event
    return owners, packed


def _iterations(streams: tuple[Stream, ...], bases: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Device loops: what follows the step that begins an iteration comes after it, whatever the order of an engine.

    Every engine fetches the body anew.
    """
    owners: list[int] = []
    packed: list[int] = []
    for stream, base in zip(streams, bases):
        steps = sorted(stream.iterations)
        for step, end in zip(steps, [*steps[1:], len(stream)]):
            owners += range(base + step + 1, base + end)
            packed += [(base + step) * 4 + Wait.result] * (end - step - 1)
    return owners, packed


def _requested(streams: tuple[Stream, ...], known: Dependences) -> tuple[list[int], list[int]]:
    owners, packed = [], []
    for stream, base in zip(streams, known.bases):
        for producer, consumer in stream.requested:
            if producer >= consumer:
                raise InvalidArgument(
                    "NKW-TIMING-ORDER",
                    f"event {consumer} ({stream.event(consumer).where}) depends_on event {producer}, which "
                    "is issued later; call depends_on on the later instruction",
                )
            if (base + producer, Wait.result) not in known.of(base + consumer):
                owners.append(base + consumer)
                packed.append((base + producer) * 4 + Wait.result)
    return owners, packed

"""Dependences: which event must wait for which event, because of the boxes that events read and write.

Two events conflict if they touch a common byte of one tensor and at least one of them writes. Serial numbers of
tensors belong to a rank, so the cores of a rank share tensors in shared HBM only. A box is a range of partitions (or
rows in HBM) times a range of bytes; a cell is the index of a distinct box (`simulate.run.boxes`). A box encloses what
an access pattern touches, so dependences can be overstated: interleaved rows of two patterns conflict although they
share no byte. The compiler's tracking by tensor overstates as well.

Registers and random generators of an engine are no tensors. An instruction that uses them depends on their last user.

An event depends on the last writer of a box and on the reads since. Of the reads of one engine the last is enough,
because an engine reads in program order. The dataflow reading has no engines and may overwrite a box before an earlier
read: it is a lower bound. DMAs of one queue overlap, so each of them counts. If engines leave program order, every
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

_UNREAD: dict[int, int] = {}  # shared by all cells without a read since their last write; never changed


class Wait(IntEnum):
    """Moment of an event until which another event waits.

    result: its result is usable (read after write, write after write, a requested order).
    read: it has read its operands (write after read). An engine has read them at the end of its issue interval, a
    DMA or a collective when it is complete.
    issue: its issue interval is over; the later result is ready no earlier than the first. This is enough between
    writes of one engine, whose pipeline delivers in order ("each stream is issued and completed in order"). It is also
    enough between matmuls that accumulate into one tile: the Tensor engine adds as the columns arrive in PSUM, and
    traces show back-to-back accumulation at the full issue rate.
    start: it starts, because both write a tile whose bytes the awaited event has waited for (`rotation`).
    """

    result = 0
    read = 1
    issue = 2
    start = 3


_RESULT, _READ, _ISSUE = int(Wait.result), int(Wait.read), int(Wait.issue)  # plain integers add faster


@dataclass(frozen=True)
class Dependences:
    """Events that each event waits for.

    Events of all streams are numbered through: event i of stream s is `bases[s] + i`, and `bases[-1]` is the number of
    all events. A dependence is the number producer * 4 + Wait; the dependences of an event are at
    `ends[event] : ends[event + 1]` of `packed`. `order` lists the segments of the streams between rendezvous, and the
    rendezvous, in an order in which they may run. With `every_read` the dependences hold in any order in which engines
    take their events, otherwise in program order only. `uses` has the first and the last users of each tensor.

    `with_room` is a cache, by the sizes of the memories: these dependences plus the waits for free bytes in SBUF and
    PSUM (`simulate.timing.rotation`).
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

    def list_waits(self, event: int) -> Iterator[tuple[int, Wait]]:
        """Yield (producer, Wait) for every dependence of one event; both events are numbered over all streams."""
        packed = self.packed[self.ends[event] : self.ends[event + 1]]
        return ((number >> 2, Wait(number & 3)) for number in packed.tolist())

    @property
    def owners(self) -> IntColumn:
        """Event that waits, for each entry of `packed`."""
        return np.repeat(np.arange(len(self.ends) - 1), np.diff(self.ends))

    def extended(self, owners: Sequence[int], packed: Sequence[int]) -> Dependences:
        """Return a copy with further dependences, after the present ones of each event; itself if there are none.

        Args:
            owners: For each further dependence, the event that waits.
            packed: For each further dependence, producer * 4 + Wait.
        """
        if not owners:
            return self
        owned, all_packed = np.append(self.owners, owners), np.append(self.packed, packed)
        ordered, ends = _order_by_owner(owned, all_packed, len(self.ends) - 1)
        return replace(self, packed=ordered, ends=ends)


def _order_by_owner(owners: IntColumn, packed: IntColumn, events: int) -> tuple[IntColumn, IntColumn]:
    """Order dependences by the events that wait, stably.

    Args:
        owners: For each dependence, the event that waits.
        packed: For each dependence, producer * 4 + Wait.
        events: The number of all events.

    Returns:
        `packed` in that order; and `events` + 1 bounds, so that the dependences of event e are at [e] : [e + 1].
    """
    ends = np.append(0, np.cumsum(np.bincount(owners, minlength=events)))
    return packed[np.argsort(owners, kind="stable")], ends


def dependences(streams: Stream | Sequence[Stream], every_read: bool = False) -> Dependences:
    """Return the dependences among the events of streams.

    Args:
        streams: The streams of one launch, or the only one.
        every_read: Whether engines may leave program order, so that an event waits for every earlier read of the
            bytes that it writes, and not only for the last read of each engine.

    Raises:
        InvalidArgument: An argument is no stream, a call of `depends_on` names an event that is issued later, or the
            streams enter rendezvous in different orders.
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
    packed, ends = np.array(tracker.packed, np.int64), np.array([0, *tracker.ends], np.int64)
    if len(streams) > 1:
        owners = np.repeat(np.array(tracker.events, np.int64), np.diff(ends))
        packed, ends = _order_by_owner(owners, packed, bases[-1])
    waits = Dependences(bases, order, packed, ends, every_read, Uses(tracker))
    waits = waits.extended(*_find_state_waits(streams, bases))
    waits = waits.extended(*_find_iteration_waits(streams, bases))
    return waits.extended(*_find_requested_waits(streams, waits))


class Uses:
    """First writers and last users of each tensor, from a tracker that has seen all events."""

    def __init__(self, tracker: _Tracker) -> None:
        self._tracker = tracker
        self._kept = WINDOW if tracker.every_read else 1
        self._last: dict[tuple[int, int], tuple[int, ...]] = {}

    def first(self, stream: int, tensor: int) -> list[int]:
        """Return the events, ascending, that write bytes of a tensor which no earlier event wrote.

        Args:
            stream: The index of the stream.
            tensor: The serial number of the tensor.
        """
        cells = self._tracker.boxes.cells_in(stream, tensor)
        return sorted({event for cell in cells for event in self._tracker.roots.get(cell, ())})

    def last(self, stream: int, tensor: int) -> tuple[int, ...]:
        """Return the last writers of a tensor and the reads since then, each as producer * 4 + Wait.

        An event that takes over the tensor's bytes waits for all of them. Of the reads of an engine the last is enough
        in program order. Out of order the last `WINDOW` are enough, since earlier reads start before them.

        Args:
            stream: The index of the stream.
            tensor: The serial number of the tensor.
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
        packed = sorted(writers)
        for lane, reads in readers.items():
            packed += sorted(reads) if lane < 0 else sorted(reads)[-self._kept :]
        known = self._last[stream, tensor] = tuple(packed)
        return known


class _Tracker:
    """Tracker of the last writer of every cell, and of the reads since then; from them follow the dependences.

    A lane is the number of a core times 8 plus its engine, or -1 on the DMA engines.
    """

    def __init__(self, streams: tuple[Stream, ...], every_read: bool) -> None:
        self.every_read = every_read
        # The events in the order in which they ran, and their dependences, which end at `ends`.
        self.events: list[int] = []
        self.packed: list[int] = []
        self.ends: list[int] = []
        self.boxes = boxes = Boxes(streams)
        # The last writer of every cell and the reads since that count, as dependences of its next writer. The garbage
        # collector does not track dicts of numbers, unlike lists.
        self.writer = [-1] * len(boxes.near)
        self.readers = [_UNREAD] * len(boxes.near)
        self.roots: dict[int, tuple[int, ...]] = {}  # writes that follow no other write, by cell
        # The engine that orders an event; -1 for events on the DMA engines, which nothing orders.
        self.lane_of: list[int] = [
            -1 if engine == Engine.dma.value else number * 8 + engine
            for number, stream in enumerate(streams)
            for engine in stream.engines
        ]
        # The operands of event e are at starts[e] : starts[e + 1] of `accesses`, each cell * 2 + whether it is written.
        self.accesses, self.starts = boxes.accesses()

    def run(self, first: int, end: int, remembered: bool) -> None:
        """Append the dependences of the events from `first` up to, but not including, `end` to `packed`.

        Args:
            first: The first event.
            end: The event after the last.
            remembered: Whether to call `remember` after each event, so that later events depend on it.
        """
        accesses, starts, lane_of = self.accesses, self.starts, self.lane_of
        packed, writer, near = self.packed, self.writer, self.boxes.near
        before_write = self._before_write
        for event in range(first, end):
            known = len(packed)
            for access in accesses[starts[event] : starts[event + 1]]:
                cell = access >> 1
                if access & 1:
                    so_far = len(packed)
                    before_write(cell, lane_of[event])
                    for neighbour, _ in near[cell]:
                        before_write(neighbour, lane_of[event])
                    if len(packed) == so_far:
                        self.roots[cell] = (*self.roots.get(cell, ()), event)
                    continue
                if writer[cell] >= 0:
                    packed.append(writer[cell])
                for neighbour, _ in near[cell]:
                    if writer[neighbour] >= 0:
                        packed.append(writer[neighbour])
            if len(packed) > known + 1:
                packed[known:] = dict.fromkeys(packed[known:])
            self.events.append(event)
            self.ends.append(len(packed))
            if remembered:
                self.remember(event)

    def _before_write(self, cell: int, lane: int) -> None:
        """Append the dependences of a write into a cell to `packed`: on its last writer and on the reads since then.

        Args:
            cell: The cell.
            lane: The lane of the event that writes; between writes of one lane `Wait.issue` is enough.
        """
        last = self.writer[cell]
        if last >= 0:
            in_order = lane >= 0 and self.lane_of[last >> 2] == lane
            self.packed.append(last + _ISSUE if in_order else last)
        if self.readers[cell]:
            self.packed += self.readers[cell].values()

    def remember(self, event: int) -> None:
        """Record an event as the last writer of the cells that it writes, and as a reader of those that it reads.

        Cells that a written cell covers lose their writer and readers, since the event follows all of them.
        """
        writer, readers, near = self.writer, self.readers, self.boxes.near
        operands = self.accesses[self.starts[event] : self.starts[event + 1]]
        for access in operands:
            if access & 1:
                cell = access >> 1
                writer[cell] = event * 4 + _RESULT
                readers[cell] = _UNREAD
                for neighbour, covered in near[cell]:
                    if covered:
                        writer[neighbour] = -1
                        readers[neighbour] = _UNREAD
        lane = self.lane_of[event]
        key = lane if lane >= 0 and not self.every_read else -1 - event
        for access in operands:
            if not access & 1:
                cell = access >> 1
                if readers[cell]:
                    readers[cell][key] = event * 4 + _READ
                else:
                    readers[cell] = {key: event * 4 + _READ}


def _find_state_waits(streams: tuple[Stream, ...], bases: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Find the dependences of events on the last user of the same registers or random generator.

    These belong to one engine, whose pipeline passes them on in order.

    Returns:
        The events that wait and, for each, producer * 4 + Wait; as `Dependences.extended` takes them.
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


def _find_iteration_waits(streams: tuple[Stream, ...], bases: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Find the dependences of the events of a device loop on the event that begins their iteration.

    They hold in any order of an engine, because every engine fetches the body anew.

    Returns:
        The events that wait and, for each, producer * 4 + Wait; as `Dependences.extended` takes them.
    """
    owners: list[int] = []
    packed: list[int] = []
    for stream, base in zip(streams, bases):
        steps = sorted(stream.iterations)
        for step, end in zip(steps, [*steps[1:], len(stream)]):
            owners += range(base + step + 1, base + end)
            packed += [(base + step) * 4 + Wait.result] * (end - step - 1)
    return owners, packed


def _find_requested_waits(streams: tuple[Stream, ...], known: Dependences) -> tuple[list[int], list[int]]:
    """Find the dependences that calls of `depends_on` request and `known` lacks.

    Returns:
        The events that wait and, for each, producer * 4 + Wait; as `Dependences.extended` takes them.

    Raises:
        InvalidArgument: A requested producer is issued after the event that waits for it.
    """
    owners, packed = [], []
    for stream, base in zip(streams, known.bases):
        for producer, consumer in stream.requested:
            if producer >= consumer:
                raise InvalidArgument(
                    "NKW-TIMING-ORDER",
                    f"event {consumer} ({stream.event(consumer).where}) depends_on event {producer}, which "
                    "is issued later; call depends_on on the later instruction",
                )
            if (base + producer, Wait.result) not in known.list_waits(base + consumer):
                owners.append(base + consumer)
                packed.append((base + producer) * 4 + Wait.result)
    return owners, packed

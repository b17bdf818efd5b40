"""Timeline: a schedule as data, with one slice for each use of an engine or of the DMA engines, in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.isa.plan import Phase
from simulate.run.stream import Stream
from simulate.timing.causes import Causes, Columns, Path, PathStep
from simulate.timing.readings import Reading
from simulate.timing.sharing import Moving, Service, Span

ENGINES = (Engine.tensor, Engine.vector, Engine.scalar, Engine.gpsimd, Engine.sync)
"""Instruction streams of a core, in the order in which reports show them."""

_ENGINE_TRACKS = ("Tensor", "Vector", "Scalar", "GpSimd", "Sync")
TRACKS = (*_ENGINE_TRACKS, *(f"DMA q {name}" for name in _ENGINE_TRACKS))
"""Tracks of a core: its engines, and the DMA queue that each of them triggers."""

FloatColumn = NDArray[np.float64]
IntColumn = NDArray[np.int64]


class SliceKind(IntEnum):
    """Kind of a slice: a table load before an activation, an instruction, or the trigger or data phase of a DMA.

    `trigger` and `transfer` also stand for collectives, which run on the DMA engines.
    """

    table_load = 0
    instruction = 1
    trigger = 2
    transfer = 3


@dataclass(frozen=True, slots=True)
class Slice:
    """Use of a track: event `event` of stream `stream` occupies it from `start_ns` to `end_ns`.

    The event's result is usable at `ready_ns`.
    """

    stream: int
    event: int
    track: str
    slice_kind: SliceKind
    start_ns: float
    end_ns: float
    ready_ns: float


@dataclass(slots=True)
class Placed:
    """Times of every event in ns while a schedule is made, by its number over all streams; -1 for none.

    `simulate.timing.core` writes them; `build_timeline` turns them into a `Timeline`.
    """

    start: list[float]
    end: list[float]  # the engine is free
    ready: list[float]
    table_load: list[float]
    data_start: list[float]
    data_end: list[float]
    cause: list[int]
    reason: list[int]
    data_cause: list[int]
    moments: list[float]  # times in ns that other events wait for; see `simulate.timing.edges`
    in_order: bool = True  # every event was placed in program order
    # See `Causes`.
    results: dict[int, tuple[int, int]] = field(default_factory=dict)
    moving: dict[int, Moving] = field(default_factory=dict)
    queues: Sequence[Sequence[Sequence[Span]]] = ()
    done_ns: float = 0.0  # time at which engines can have done all their work, see `schedule`
    services: Sequence[Service] = ()
    services_until: Phase = Phase.completion

    @classmethod
    def allocate(cls, events: int, moments: int) -> Placed:
        """Return columns for `events` events with `moments` moments each: times are 0, absent times and causes -1."""
        start, end, ready = ([0.0] * events for _ in range(3))
        table_load, data_start, data_end = ([-1.0] * events for _ in range(3))
        cause, reason, data_cause = ([-1] * events for _ in range(3))
        all_moments = [0.0] * (events * moments)
        return cls(
            start, end, ready, table_load, data_start, data_end, cause, reason, data_cause, all_moments
        )

    @property
    def length_ns(self) -> float:
        """Time in ns at which every engine is free, every result ready, and engines can have done all their work."""
        return max(max(self.end, default=0.0), max(self.ready, default=0.0), self.done_ns)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times of all slices of a launch.

    Columns have one entry for each slice, ordered by stream, event and kind. `stream`, `event` and `track` are indices:
    of the stream in the launch, of the event in its stream, and in `tracks`. `ready_ns` is the time at which the result
    of the slice's event is usable.

    `length_ns` is the time from the first start to the last result, or until engines can have done all their work. This
    is device time. Starting and ending a kernel adds `overhead_ns`, and a synchronous call from the host adds the
    `host_overhead_ns` of the hardware record. A track is busy while at least one slice is on it: an engine during issue
    intervals, a DMA queue during the data phase of any of its DMAs.
    """

    reading: Reading
    tracks: tuple[str, ...]
    stream: IntColumn
    event: IntColumn
    track: IntColumn
    slice_kind: IntColumn
    start_ns: FloatColumn
    end_ns: FloatColumn
    ready_ns: FloatColumn
    length_ns: float
    overhead_ns: float
    bases: tuple[int, ...]
    causes: Causes

    def __len__(self) -> int:
        return len(self.start_ns)

    def slices(self) -> Iterator[Slice]:
        """Yield the slices in the order of the columns: by stream, event and kind."""
        columns = (
            self.stream,
            self.event,
            self.track,
            self.slice_kind,
            self.start_ns,
            self.end_ns,
            self.ready_ns,
        )
        for stream, event, track, slice_kind, start, end, ready in zip(
            *(column.tolist() for column in columns)
        ):
            yield Slice(stream, event, self.tracks[track], SliceKind(slice_kind), start, end, ready)

    def by_start(self) -> list[Slice]:
        """Return the slices sorted by start; equal starts are sorted by stream, event and kind."""
        return sorted(
            self.slices(), key=lambda piece: (piece.start_ns, piece.stream, piece.event, piece.slice_kind)
        )

    @cached_property
    def busy_ns(self) -> dict[str, float]:
        """Time in ns during which at least one slice is on a track, by the track's name."""
        return {
            name: _measure_union(self.start_ns[self.track == number], self.end_ns[self.track == number])
            for number, name in enumerate(self.tracks)
        }

    @cached_property
    def idle_ns(self) -> dict[str, float]:
        """Time in ns of the timeline's length during which no slice is on a track, by the track's name."""
        return {name: self.length_ns - busy for name, busy in self.busy_ns.items()}

    @property
    def busiest(self) -> str:
        """Name of the track that is busy longest; the first of equals."""
        return max(self.tracks, key=lambda name: self.busy_ns[name])

    @cached_property
    def critical_path(self) -> tuple[PathStep, ...]:
        """Chain of events that ends last, first event first; empty without events.

        Each event of the chain waits for the one before it, as its `Reason` says.
        """
        if not len(self):
            return ()
        is_main = (self.slice_kind == SliceKind.instruction) | (self.slice_kind == SliceKind.trigger)
        columns = Columns(
            self.start_ns[is_main],
            self.end_ns[is_main],
            self.ready_ns[is_main],
            self._find_begins(SliceKind.table_load),
            self._find_begins(SliceKind.transfer),
            self.slice_kind[is_main] == SliceKind.trigger,
        )
        return Path(self.causes, columns, self.bases).find_steps()

    def _find_begins(self, slice_kind: SliceKind) -> FloatColumn:
        """Return the begin in ns of the slice of a kind, for every event over all streams; -1 where there is none."""
        begins, rows = np.full(self.bases[-1], -1.0), np.flatnonzero(self.slice_kind == slice_kind)
        begins[np.array(self.bases)[self.stream[rows]] + self.event[rows]] = self.start_ns[rows]
        return begins


def build_timeline(
    streams: Sequence[Stream], hardware: Hardware, reading: Reading, bases: tuple[int, ...], placed: Placed
) -> Timeline:
    """Return the timeline of events that have been placed in time.

    Args:
        streams: The streams of the launch.
        hardware: The record of the chip, for the lengths of table loads and the overhead of a kernel.
        reading: The reading by which the events were placed.
        bases: The number of event 0 of each stream over all streams, and the number of all events.
        placed: The times and causes of all events.
    """
    start, end, ready = np.array(placed.start), np.array(placed.end), np.array(placed.ready)
    load, data_start, data_end = (
        np.array(placed.table_load),
        np.array(placed.data_start),
        np.array(placed.data_end),
    )
    numbers = np.arange(len(start))
    owner = np.repeat(np.arange(len(streams)), [len(stream) for stream in streams])
    on_dma = np.concatenate(
        [np.zeros(0, bool), *(_view_bytes(s.engines) == Engine.dma.value for s in streams)]
    )
    lane = _find_lanes(
        np.concatenate([np.zeros(0, np.uint8), *(_view_bytes(stream.triggers) for stream in streams)])
    )
    engine_track = owner * len(TRACKS) + lane
    loads, transfers = np.flatnonzero(load >= 0.0), np.flatnonzero(data_start >= 0.0)
    rows = np.concatenate([numbers, loads, transfers])
    slice_kinds = np.concatenate(
        [
            np.where(on_dma, SliceKind.trigger, SliceKind.instruction),
            np.full(len(loads), int(SliceKind.table_load)),
            np.full(len(transfers), int(SliceKind.transfer)),
        ]
    )
    track = np.concatenate([engine_track, engine_track[loads], engine_track[transfers] + len(ENGINES)])
    begin = np.concatenate([start, load[loads], data_start[transfers]])
    until = np.concatenate([end, load[loads] + hardware.activation_table_load_ns, data_end[transfers]])
    order = np.lexsort((slice_kinds, rows))
    names, renumbered = _list_tracks(streams, track)
    last_slice_ns = max(float(end.max(initial=0.0)), float(ready.max(initial=0.0)))
    return Timeline(
        reading=reading,
        tracks=names,
        stream=owner[rows][order],
        event=(rows - np.array(bases)[owner[rows]])[order],
        track=renumbered[track][order],
        slice_kind=slice_kinds[order],
        start_ns=begin[order],
        end_ns=until[order],
        ready_ns=ready[rows][order],
        length_ns=placed.length_ns,
        overhead_ns=hardware.kernel_start_ns + hardware.kernel_end_ns,
        bases=bases,
        causes=Causes(
            np.array(placed.cause, np.int32),
            np.array(placed.reason, np.int8),
            np.array(placed.data_cause, np.int32),
            placed.results,
            placed.moving,
            placed.queues,
            placed.services if placed.done_ns > last_slice_ns else (),
            placed.services_until,
        ),
    )


def format_core_label(streams: Sequence[Stream], number: int) -> str:
    """Return the name of a core in reports, such as "rank 1" or "rank 1 core 0"; empty if the launch has one core.

    Args:
        streams: The streams of the launch, one for each core.
        number: The index of the core's stream.
    """
    if len(streams) == 1:
        return ""
    stream = streams[number]
    shared = sum(other.rank == stream.rank for other in streams) > 1
    return f"rank {stream.rank}" + (f" core {stream.core}" if shared else "")


def _view_bytes(column: object) -> NDArray[np.uint8]:
    """View a column of bytes of a stream as an array."""
    return np.frombuffer(column, np.uint8)  # type: ignore[call-overload, no-any-return]


def _find_lanes(triggers: NDArray[np.uint8]) -> IntColumn:
    """Return the index in `ENGINES` of each triggering engine; engines without a stream count as the Sync engine."""
    table = np.full(max(engine.value for engine in Engine) + 1, ENGINES.index(Engine.sync))
    for lane, engine in enumerate(ENGINES):
        table[engine.value] = lane
    return table[triggers]


def _list_tracks(streams: Sequence[Stream], used: IntColumn) -> tuple[tuple[str, ...], IntColumn]:
    """List the tracks of a launch by name: all engines of each core, and the DMA queues that have slices.

    Args:
        streams: The streams, one for each core.
        used: The raw tracks that have slices: core * len(TRACKS) + index in `TRACKS`.

    Returns:
        The names; and for each raw track its index among the names, -1 if it is left out.
    """
    present = set(np.unique(used).tolist())
    names: list[str] = []
    renumbered = np.full(len(streams) * len(TRACKS), -1)
    for core in range(len(streams)):
        label = format_core_label(streams, core)
        prefix = f"{label} " if label else ""
        for slot in range(len(TRACKS)):
            raw = core * len(TRACKS) + slot
            if slot < len(ENGINES) or raw in present:
                renumbered[raw] = len(names)
                names.append(prefix + TRACKS[slot])
    return tuple(names), renumbered


def _measure_union(start: FloatColumn, end: FloatColumn) -> float:
    """Return the length in ns of the union of intervals, given their starts and ends; 0 without intervals."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.concatenate([[start[0]], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())

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
    """Kind of a slice: a table load before an activation, an instruction, a DMA's trigger or data phase."""

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
    """Times of every event in ns while a schedule is made, by its number over all streams; -1 for none."""

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
        """Return columns for `events` events with `moments` moments each."""
        start, end, ready = ([0.0] * events for _ in range(3))
        table_load, data_start, data_end = ([-1.0] * events for _ in range(3))
        cause, reason, data_cause = ([-1] * events for _ in range(3))
        all_moments = [0.0] * (events * moments)
        return cls(
            start, end, ready, table_load, data_start, data_end, cause, reason, data_cause, all_moments
        )

    @property
    def length_ns(self) -> float:
        """Time at which the last engine is free, the last result is ready, and engines can have done all their work."""
        return max(max(self.end, default=0.0), max(self.ready, default=0.0), self.done_ns)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times of all slices of a launch.

    Columns have one entry for each slice, ordered by stream, event and kind. `length_ns` is the time from the first
    start
    to the last result, or until engines can have done all their work: device time, to which starting and ending a
    kernel
    adds `overhead_ns`, and a synchronous call from the host the `host_overhead_ns` of the hardware record. A track is
    busy while at least one slice is on it: an engine's issue interval, for a DMA queue the data phase of any of its
    DMAs.
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
        """Yield the slices."""
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
        """Return the slices in the order of start, equal starts in the order of stream and event."""
        return sorted(
            self.slices(), key=lambda piece: (piece.start_ns, piece.stream, piece.event, piece.slice_kind)
        )

    @cached_property
    def busy_ns(self) -> dict[str, float]:
        """Time during which a slice is on a track, for every track."""
        return {
            name: _union_length(self.start_ns[self.track == number], self.end_ns[self.track == number])
            for number, name in enumerate(self.tracks)
        }

    @cached_property
    def idle_ns(self) -> dict[str, float]:
        """Time during which no slice is on a track, for every track."""
        return {name: self.length_ns - busy for name, busy in self.busy_ns.items()}

    @property
    def busiest(self) -> str:
        """Track that is busy longest; the first of equals."""
        return max(self.tracks, key=lambda name: self.busy_ns[name])

    @cached_property
    def critical_path(self) -> tuple[PathStep, ...]:
        """Chain of events that ends last, first event first: none of them could start earlier."""
        if not len(self):
            return ()
        is_main = (self.slice_kind == SliceKind.instruction) | (self.slice_kind == SliceKind.trigger)
        columns = Columns(
            self.start_ns[is_main],
            self.end_ns[is_main],
            self.ready_ns[is_main],
            self._begins(SliceKind.table_load),
            self._begins(SliceKind.transfer),
            self.slice_kind[is_main] == SliceKind.trigger,
        )
        return Path(self.causes, columns, self.bases).steps()

    def _begins(self, slice_kind: SliceKind) -> FloatColumn:
        """Return the begin of each event's slice of a kind in ns, -1 if it has none."""
        begins, rows = np.full(self.bases[-1], -1.0), np.flatnonzero(self.slice_kind == slice_kind)
        begins[np.array(self.bases)[self.stream[rows]] + self.event[rows]] = self.start_ns[rows]
        return begins


def build_timeline(
    streams: Sequence[Stream], hardware: Hardware, reading: Reading, bases: tuple[int, ...], placed: Placed
) -> Timeline:
    """Return the timeline of placed events."""
    start, end, ready = np.array(placed.start), np.array(placed.end), np.array(placed.ready)
    load, data_start, data_end = (
        np.array(placed.table_load),
        np.array(placed.data_start),
        np.array(placed.data_end),
    )
    numbers = np.arange(len(start))
    owner = np.repeat(np.arange(len(streams)), [len(stream) for stream in streams])
    on_dma = np.concatenate([np.zeros(0, bool), *(_column(s.engines) == Engine.dma.value for s in streams)])
    lane = _lanes(np.concatenate([np.zeros(0, np.uint8), *(_column(stream.triggers) for stream in streams)]))
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
    names, renumbered = _tracks(streams, track)
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


def core_label(streams: Sequence[Stream], number: int) -> str:
    """Return the name of a core in reports, empty if the launch has a single core."""
    if len(streams) == 1:
        return ""
    stream = streams[number]
    shared = sum(other.rank == stream.rank for other in streams) > 1
    return f"rank {stream.rank}" + (f" core {stream.core}" if shared else "")


def _column(column: object) -> NDArray[np.uint8]:
    return np.frombuffer(column, np.uint8)  # type: ignore[call-overload, no-any-return]


def _lanes(triggers: NDArray[np.uint8]) -> IntColumn:
    table = np.full(max(engine.value for engine in Engine) + 1, ENGINES.index(Engine.sync))
    for lane, engine in enumerate(ENGINES):
        table[engine.value] = lane
    return table[triggers]


def _tracks(streams: Sequence[Stream], used: IntColumn) -> tuple[tuple[str, ...], IntColumn]:
    """Return the names of the tracks, every engine and the DMA queues in use, and the new index of each raw track."""
    present = set(np.unique(used).tolist())
    names: list[str] = []
    renumbered = np.full(len(streams) * len(TRACKS), -1)
    for core in range(len(streams)):
        label = core_label(streams, core)
        prefix = f"{label} " if label else ""
        for slot in range(len(TRACKS)):
            raw = core * len(TRACKS) + slot
            if slot < len(ENGINES) or raw in present:
                renumbered[raw] = len(names)
                names.append(prefix + TRACKS[slot])
    return tuple(names), renumbered


def _union_length(start: FloatColumn, end: FloatColumn) -> float:
    """Return the length of the union of intervals."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.concatenate([[start[0]], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())

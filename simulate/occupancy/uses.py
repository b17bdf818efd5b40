"""The tiles in SBUF and PSUM of one core, each with its lifetime and its place: derived from a recorded launch.

Time is program order: one step per instruction. A tile is live from its first to its last use, and lies where
`simulate.memory.placement` puts it: at its `address=`, else first fit. The compiler may place tiles elsewhere; the
number of live bytes stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from nkw.errors import Location
from nkw.terminal import Displayed
from simulate.hardware import Hardware
from simulate.lines import location
from simulate.memory import MemoryRegion
from simulate.memory.placement import Placement, largest_fit, least_bytes
from simulate.occupancy.loops import Loop, loops_of
from simulate.run import Launch, Stream
from simulate.run.machine import capacity_bytes

MEMORIES = (MemoryRegion.sbuf, MemoryRegion.psum)

Nest = tuple[tuple[tuple[Loop, ...], int, int], ...]
"""Runs of events under the same loops: the loops, the first event and the one after the last."""


@dataclass(frozen=True, slots=True)
class Use:
    """One tile: bytes per partition from `offset`, partitions from `first_partition`, uses as event numbers."""

    offset: int
    bytes: int
    first_partition: int
    partitions: int
    first_use: int
    last_use: int
    source: int

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.offset + self.bytes


@dataclass(frozen=True, slots=True)
class Source:
    """The tiles that one allocation in the kernel made, all of one shape and dtype.

    `name` is what `name=` says, else the variable it is assigned to. `callers` are kernel lines, outermost first.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    element_bytes: int
    where: Location | None
    callers: tuple[Location, ...]
    loops: tuple[Loop, ...]
    addressed: bool
    tiles: int
    most_live: int

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Level:
    """A loop of the kernel inside its outer loops, and the most bytes that were live while it ran.

    `own_bytes` belong to tiles that were allocated inside the loop. `peak_event` is the first with that many bytes.
    """

    path: tuple[Loop, ...]
    events: int
    live_bytes: int
    own_bytes: int
    peak_event: int


@dataclass(frozen=True, slots=True)
class Bank:
    """One PSUM bank: the number of its tiles, the most bytes used, and the number of events while it held a tile."""

    number: int
    tiles: int
    high_water_bytes: int
    events: int


@dataclass(frozen=True)
class Memory:
    """SBUF or PSUM of one core during a launch; bytes are per partition.

    Tiles on 64 or fewer partitions may lie side by side; they count once among the live bytes.
    """

    region: MemoryRegion
    partitions: int
    usable_bytes: int
    bank_bytes: int | None
    uses: tuple[Use, ...]
    sources: tuple[Source, ...]
    high_water_bytes: int
    live_bytes: np.ndarray = field(repr=False, compare=False)
    levels: tuple[Level, ...]
    placement: Placement = field(repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live at one time."""
        return self.placement.live_bytes

    @cached_property
    def peak_event(self) -> int:
        """The first event at which most bytes were live; 0 without tiles."""
        return int(np.argmax(self.live_bytes)) if len(self.live_bytes) else 0

    def live_at(self, event: int) -> tuple[Use, ...]:
        """The tiles that are live at an event, by their first byte."""
        live = [use for use in self.uses if use.first_use <= event <= use.last_use]
        return tuple(sorted(live, key=lambda use: (use.offset, use.first_use)))

    @cached_property
    def misfits(self) -> tuple[Use, ...]:
        """The tiles that end beyond the usable bytes, the first placed first."""
        return tuple(use for use in self.uses if use.end > self.usable_bytes)

    @cached_property
    def banks(self) -> tuple[Bank, ...]:
        """The eight banks of PSUM; none for SBUF."""
        if self.bank_bytes is None:
            return ()
        return tuple(
            self._bank(number, self.bank_bytes) for number in range(self.usable_bytes // self.bank_bytes)
        )

    def _bank(self, number: int, size: int) -> Bank:
        start = number * size
        held = [use for use in self.uses if use.offset < start + size and use.end > start]
        busy = np.zeros(len(self.live_bytes) + 1, np.int64)
        for use in held:
            busy[use.first_use] += 1
            busy[use.last_use + 1] -= 1
        highest = max((min(use.end, start + size) - start for use in held), default=0)
        return Bank(number, len(held), highest, int(np.count_nonzero(np.cumsum(busy)[:-1])))

    def largest_free_size(self, source: int) -> int:
        """The largest free size, in elements, of the tiles of a source that fits while all other tiles stay."""
        chosen = {tile.serial for tile, use in zip(self.placement.tiles, self.uses) if use.source == source}
        size = largest_fit(self.placement.tiles, chosen, self.usable_bytes, self.bank_bytes)
        return size // self.sources[source].element_bytes

    @cached_property
    def ranks(self) -> dict[int, int]:
        """Ranks of the sources: first those live at the peak by the bytes they take there, then by their size."""
        first = self.largest_sources
        rest = sorted(
            set(range(len(self.sources))) - set(first),
            key=lambda number: (-self.sources[number].bytes * self.sources[number].most_live, number),
        )
        return {number: rank for rank, number in enumerate([*first, *rest])}

    @cached_property
    def largest_sources(self) -> tuple[int, ...]:
        """The numbers of the sources that are live at the peak, by the bytes they take there."""
        taken: dict[int, int] = {}
        for use in self.live_at(self.peak_event):
            taken[use.source] = taken.get(use.source, 0) + use.bytes
        return tuple(sorted(taken, key=lambda source: (-taken[source], source)))


@dataclass(frozen=True, repr=False)
class Occupancy(Displayed):
    """SBUF and PSUM of one core during one launch.

    `print` shows the report of `text`; a notebook shows the picture of `svg`, with the report below it.
    """

    kernel: str
    chip: str
    rank: int
    core: int
    events: int
    nest: Nest
    sbuf: Memory
    psum: Memory

    @property
    def memories(self) -> tuple[Memory, Memory]:
        """SBUF, then PSUM."""
        return self.sbuf, self.psum

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{each.region.value.upper()} {each.peak_bytes:,} of {each.usable_bytes:,}"
            for each in self.memories
        )
        return f"<occupancy of {self.kernel} on {self.chip}: {sizes} bytes per partition live at most>"


def occupancies(launch: Launch) -> tuple[Occupancy, ...]:
    """What every core of a launch had in SBUF and PSUM, rank by rank.

    Loops of callers are known for launches collected with `recorded(calls=True)`; otherwise those of the innermost
    function only.
    """
    return tuple(
        _occupancy(launch.kernel, stream, placements, launch.hardware)
        for stream, placements in zip(launch.streams, launch.placements)
    )


def _occupancy(
    kernel: str, stream: Stream, placements: dict[MemoryRegion, Placement], chip: Hardware
) -> Occupancy:
    ids, chains = stream.chains()
    numbers = np.asarray(ids, np.int64)
    paths = [loops_of(chain) for chain in chains]
    sbuf, psum = (_memory(region, stream, placements[region], chip, numbers, paths) for region in MEMORIES)
    nest = _nest(numbers, paths)
    return Occupancy(kernel, chip.label, stream.rank, stream.core, len(stream), nest, sbuf, psum)


def _nest(numbers: np.ndarray, paths: list[tuple[Loop, ...]]) -> Nest:
    """Runs of events under the same loops."""
    runs: list[tuple[tuple[Loop, ...], int, int]] = []
    changes = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    for start, end in pairwise(changes):
        if start == end:
            continue
        path = paths[numbers[start]]
        if runs and runs[-1][0] == path:
            runs[-1] = (path, runs[-1][1], end)
        else:
            runs.append((path, start, end))
    return tuple(runs)


def _memory(
    region: MemoryRegion,
    stream: Stream,
    placement: Placement,
    chip: Hardware,
    numbers: np.ndarray,
    paths: list[tuple[Loop, ...]],
) -> Memory:
    found: dict[Hashable, int] = {}
    serials: dict[int, list[int]] = defaultdict(list)
    uses = []
    for tile in placement.tiles:
        record = stream.tensors[tile.serial]
        key = (tile.source, record.address, record.explicit_name)
        number = found.setdefault(key, len(found))
        serials[number].append(tile.serial)
        offset = placement.offsets[tile.serial]
        uses.append(
            Use(
                offset,
                tile.bytes,
                placement.first_partitions[tile.serial],
                record.shape[0],
                tile.first_use,
                tile.last_use,
                number,
            )
        )
    live = _live(uses, len(stream))
    sources = tuple(_source(stream, members) for members in serials.values())
    return Memory(
        region,
        chip.partitions,
        capacity_bytes(chip, region),
        chip.psum_bank_bytes if region is MemoryRegion.psum else None,
        tuple(uses),
        sources,
        placement.high_water_bytes,
        live,
        _levels(uses, sources, live, numbers, paths),
        placement,
    )


def _live(uses: list[Use], events: int) -> np.ndarray:
    """The live bytes at every event, as `least_bytes` counts them."""
    changes: dict[int, list[tuple[int, Use]]] = {}
    for number, use in enumerate(uses):
        changes.setdefault(use.first_use, []).append((number, use))
        changes.setdefault(use.last_use + 1, []).append((number, use))
    live = np.zeros(events, np.int64)
    members: dict[int, Use] = {}
    for event, following in pairwise([*sorted(changes), events]):
        for number, use in changes[event]:
            if use.first_use == event:
                members[number] = use
            else:
                del members[number]
        live[event:following] = least_bytes((use.bytes, use.partitions) for use in members.values())
    return live


def _source(stream: Stream, serials: list[int]) -> Source:
    record = stream.tensors[serials[0]]
    line = record.line
    events = sorted(
        (at, step) for s in serials for at, step in ((stream.first_use[s], 1), (stream.last_use[s] + 1, -1))
    )
    most = count = 0
    for _, step in events:
        count += step
        most = max(most, count)
    elements = record.row_bytes * record.shape[0]
    return Source(
        record.name,
        record.shape,
        record.dtype,
        record.row_bytes,
        max(1, elements // int(np.prod(record.shape))),
        record.where,
        tuple(location(caller) for caller in record.callers),
        loops_of((*record.callers, line)) if line is not None else (),
        record.address is not None,
        len(serials),
        most,
    )


def _levels(
    uses: list[Use],
    sources: tuple[Source, ...],
    live: np.ndarray,
    numbers: np.ndarray,
    paths: list[tuple[Loop, ...]],
) -> tuple[Level, ...]:
    """Every prefix of every loop path that occurs, in the order in which the loops were entered."""
    order = np.argsort(numbers, kind="stable")
    bounds = np.searchsorted(numbers[order], np.arange(len(paths) + 1))
    best: dict[tuple[Loop, ...], tuple[int, int]] = {}  # most live bytes, at which event
    entered: dict[tuple[Loop, ...], int] = {}
    counts: dict[tuple[Loop, ...], int] = {}
    for number, path in enumerate(paths):
        events = order[bounds[number] : bounds[number + 1]]
        if not len(events):
            continue
        peak = int(events[np.argmax(live[events])])
        most = int(live[peak])
        for depth in range(len(path) + 1):
            level = path[:depth]
            counts[level] = counts.get(level, 0) + len(events)
            entered[level] = min(entered.get(level, int(events[0])), int(events[0]))
            known = best.get(level)
            if known is None or (-most, peak) < (-known[0], known[1]):
                best[level] = (most, peak)
    found = []
    for path in sorted(best, key=lambda path: tuple(entered[path[:depth]] for depth in range(len(path) + 1))):
        most, peak = best[path]
        own = least_bytes(
            (use.bytes, use.partitions)
            for use in uses
            if use.first_use <= peak <= use.last_use and sources[use.source].loops[: len(path)] == path
        )
        found.append(Level(path, counts[path], most, own, peak))
    return tuple(found)

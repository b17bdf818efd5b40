"""Tiles in SBUF and PSUM of a core with their lifetimes and addresses, derived from a recorded launch.

Time is program order: a step for each instruction, called event. A tile is live from its first to its last use.
`simulate.memory.placement` assigns its address: its `address=`, else first fit. The compiler may place tiles
elsewhere; the number of live bytes stays. An allocation (`Source`) is a line of the kernel that makes tiles, under one
chain of callers. Bytes are per partition.
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
from simulate.memory.placement import Placement, bound_bytes, find_largest_fit
from simulate.occupancy.loops import Loop, find_loops
from simulate.run import Launch, Stream
from simulate.run.machine import capacity_bytes

MEMORIES = (MemoryRegion.sbuf, MemoryRegion.psum)

Nest = tuple[tuple[tuple[Loop, ...], int, int], ...]
"""Runs of events under the same loops: (loops, first event, end event)."""


@dataclass(frozen=True, slots=True)
class Use:
    """A tile: `bytes` bytes per partition from byte `offset`, on `partitions` partitions from `first_partition`.

    `first_use` and `last_use` are the first and the last event that reads or writes it; `source` is the index of its
    allocation in `Memory.sources`.
    """

    offset: int
    bytes: int
    first_partition: int
    partitions: int
    first_use: int
    last_use: int
    source: int

    @property
    def end(self) -> int:
        """First byte after the tile."""
        return self.offset + self.bytes


@dataclass(frozen=True, slots=True)
class Source:
    """Allocation of a kernel, with the tiles that it made, all of the same shape and dtype.

    `name` is the argument `name=`, else the variable that it is assigned to. `bytes` is the size of one tile per
    partition. `where` is its line, `callers` are the lines that called it, outermost first. `loops` are the loops
    around it. `addressed` tells whether it has an `address=`. `tiles` counts its tiles, `most_live` those live at once.
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
    """A loop of the kernel, and the most bytes that are live at one time while it runs.

    `path` has the loop last, after its outer loops; it is empty for the whole kernel. `events` counts the instructions
    inside. `peak_event` is the first event with `live_bytes`; `inner_bytes` of them belong to tiles that were allocated
    inside the loop.
    """

    path: tuple[Loop, ...]
    events: int
    live_bytes: int
    inner_bytes: int
    peak_event: int


@dataclass(frozen=True, slots=True)
class Bank:
    """A PSUM bank by its number: tiles that touch it, highest byte used, and number of events with a live tile."""

    number: int
    tiles: int
    high_water_bytes: int
    events: int


@dataclass(frozen=True)
class Memory:
    """SBUF or PSUM of a core during a launch; bytes are per partition.

    `uses` are the tiles, `sources` their allocations, `live_bytes` the live bytes at every event. Tiles on different
    partitions can use the same bytes; they count once among the live bytes. `high_water_bytes` is the end of the tile
    placed highest. `bank_bytes` is the size of a bank, None for SBUF. `levels` are the loops.
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
        """Most bytes that are live at the same time."""
        return self.placement.live_bytes

    @cached_property
    def peak_event(self) -> int:
        """First event with the most live bytes; 0 without tiles."""
        return int(np.argmax(self.live_bytes)) if len(self.live_bytes) else 0

    def live_at(self, event: int) -> tuple[Use, ...]:
        """Return the tiles that are live at an event, by their first byte."""
        live = [use for use in self.uses if use.first_use <= event <= use.last_use]
        return tuple(sorted(live, key=lambda use: (use.offset, use.first_use)))

    @cached_property
    def misfits(self) -> tuple[Use, ...]:
        """Tiles that end after the usable bytes, in the order of `uses`; empty if all tiles fit."""
        return tuple(use for use in self.uses if use.end > self.usable_bytes)

    @cached_property
    def banks(self) -> tuple[Bank, ...]:
        """The eight banks of PSUM; empty for SBUF."""
        if self.bank_bytes is None:
            return ()
        return tuple(
            self._make_bank(number, self.bank_bytes) for number in range(self.usable_bytes // self.bank_bytes)
        )

    def _make_bank(self, number: int, size: int) -> Bank:
        """Return the occupancy of PSUM bank `number`; `size` is the bytes of a bank."""
        start = number * size
        bank_uses = [use for use in self.uses if use.offset < start + size and use.end > start]
        busy = np.zeros(len(self.live_bytes) + 1, np.int64)
        for use in bank_uses:
            busy[use.first_use] += 1
            busy[use.last_use + 1] -= 1
        highest = max((min(use.end, start + size) - start for use in bank_uses), default=0)
        return Bank(number, len(bank_uses), highest, int(np.count_nonzero(np.cumsum(busy)[:-1])))

    def largest_free_size(self, source: int) -> int:
        """Return how many elements an allocation's tiles could have per partition, so that all tiles still fit.

        All tiles of the allocation get this size together; all other tiles keep theirs. 0 if no size fits.

        Args:
            source: The index of the allocation in `sources`.
        """
        chosen = {tile.serial for tile, use in zip(self.placement.tiles, self.uses) if use.source == source}
        size = find_largest_fit(self.placement.tiles, chosen, self.usable_bytes, self.bank_bytes)
        return size // self.sources[source].element_bytes

    @cached_property
    def ranks(self) -> dict[int, int]:
        """Rank of each allocation, 0 first, by its index in `sources`; the order of iteration is that of the ranks.

        Allocations live at the peak come first, by their bytes there, then the others by bytes times `most_live`.
        """
        largest = self.largest_sources
        remaining = sorted(
            set(range(len(self.sources))) - set(largest),
            key=lambda number: (-self.sources[number].bytes * self.sources[number].most_live, number),
        )
        return {number: rank for rank, number in enumerate([*largest, *remaining])}

    @cached_property
    def largest_sources(self) -> tuple[int, ...]:
        """Indices of the allocations with live tiles at `peak_event`, in descending order of their bytes there."""
        taken: dict[int, int] = {}
        for use in self.live_at(self.peak_event):
            taken[use.source] = taken.get(use.source, 0) + use.bytes
        return tuple(sorted(taken, key=lambda source: (-taken[source], source)))


@dataclass(frozen=True, repr=False)
class Occupancy(Displayed):
    """SBUF and PSUM of a core during a launch of `events` instructions; `nest` tells which loops are open when.

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
            f"{memory.region.value.upper()} {memory.peak_bytes:,} of {memory.usable_bytes:,}"
            for memory in self.memories
        )
        return f"<occupancy of {self.kernel} on {self.chip}: {sizes} bytes per partition live at most>"


def occupancies(launch: Launch) -> tuple[Occupancy, ...]:
    """Return the occupancy of SBUF and PSUM of every core of a launch, in the order of its streams.

    Loops around callers are known for launches collected with `recorded(calls=True)`, otherwise only those of the
    innermost function.
    """
    return tuple(
        _make_occupancy(launch.kernel, stream, placements, launch.hardware)
        for stream, placements in zip(launch.streams, launch.placements)
    )


def _make_occupancy(
    kernel: str, stream: Stream, placements: dict[MemoryRegion, Placement], chip: Hardware
) -> Occupancy:
    """Return the occupancy of the core that ran a stream, from the placements of its tiles in SBUF and PSUM."""
    ids, chains = stream.chains()
    chain_ids = np.asarray(ids, np.int64)
    paths = [find_loops(chain) for chain in chains]
    sbuf, psum = (
        _make_memory(region, stream, placements[region], chip, chain_ids, paths) for region in MEMORIES
    )
    nest = _find_nest(chain_ids, paths)
    return Occupancy(kernel, chip.label, stream.rank, stream.core, len(stream), nest, sbuf, psum)


def _find_nest(chain_ids: np.ndarray, paths: list[tuple[Loop, ...]]) -> Nest:
    """Return the runs of events under the same loops, in program order.

    Args:
        chain_ids: For every event, the index in `paths`.
        paths: Loops, outermost first, around each distinct chain of kernel lines.
    """
    runs: list[tuple[tuple[Loop, ...], int, int]] = []
    changes = [0, *(np.flatnonzero(np.diff(chain_ids)) + 1).tolist(), len(chain_ids)]
    for start, end in pairwise(changes):
        if start == end:
            continue
        path = paths[chain_ids[start]]
        if runs and runs[-1][0] == path:
            runs[-1] = (path, runs[-1][1], end)
        else:
            runs.append((path, start, end))
    return tuple(runs)


def _make_memory(
    region: MemoryRegion,
    stream: Stream,
    placement: Placement,
    chip: Hardware,
    chain_ids: np.ndarray,
    paths: list[tuple[Loop, ...]],
) -> Memory:
    """Return the occupancy of SBUF or PSUM from its tiles' placement; the last two arguments as for `_find_nest`."""
    source_numbers: dict[Hashable, int] = {}
    serials: dict[int, list[int]] = defaultdict(list)
    uses = []
    for tile in placement.tiles:
        record = stream.tensors[tile.serial]
        key = (tile.source, record.address, record.explicit_name)
        number = source_numbers.setdefault(key, len(source_numbers))
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
    live_bytes = _count_live_bytes(uses, len(stream))
    sources = tuple(_describe_source(stream, members) for members in serials.values())
    return Memory(
        region,
        chip.partitions,
        capacity_bytes(chip, region),
        chip.psum_bank_bytes if region is MemoryRegion.psum else None,
        tuple(uses),
        sources,
        placement.high_water_bytes,
        live_bytes,
        _find_levels(uses, sources, live_bytes, chain_ids, paths),
        placement,
    )


def _count_live_bytes(uses: list[Use], events: int) -> np.ndarray:
    """Return the live bytes per partition at every event; tiles that can be on different partitions share bytes."""
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
        live[event:following] = bound_bytes((use.bytes, use.partitions) for use in members.values())
    return live


def _describe_source(stream: Stream, serials: list[int]) -> Source:
    """Return the allocation that made the tiles with these serial numbers of the stream."""
    record = stream.tensors[serials[0]]
    line = record.line
    events = sorted(
        (event, step)
        for serial in serials
        for event, step in ((stream.first_use[serial], 1), (stream.last_use[serial] + 1, -1))
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
        find_loops((*record.callers, line)) if line is not None else (),
        record.address is not None,
        len(serials),
        most,
    )


def _find_levels(
    uses: list[Use],
    sources: tuple[Source, ...],
    live: np.ndarray,
    chain_ids: np.ndarray,
    paths: list[tuple[Loop, ...]],
) -> tuple[Level, ...]:
    """Return the whole kernel and every loop with its live bytes, in the order in which the loops were entered.

    Args:
        uses: The tiles of the memory.
        sources: Their allocations.
        live: The live bytes at every event.
        chain_ids: For every event, the index in `paths`.
        paths: Loops, outermost first, around each distinct chain of kernel lines.
    """
    order = np.argsort(chain_ids, kind="stable")
    bounds = np.searchsorted(chain_ids[order], np.arange(len(paths) + 1))
    peaks: dict[tuple[Loop, ...], tuple[int, int]] = {}  # most live bytes, first event with them
    entered: dict[tuple[Loop, ...], int] = {}
    counts: dict[tuple[Loop, ...], int] = {}
    for number, path in enumerate(paths):
        events = order[bounds[number] : bounds[number + 1]]
        if not len(events):
            continue
        peak = int(events[np.argmax(live[events])])
        most_bytes = int(live[peak])
        for depth in range(len(path) + 1):
            level = path[:depth]
            counts[level] = counts.get(level, 0) + len(events)
            entered[level] = min(entered.get(level, int(events[0])), int(events[0]))
            highest = peaks.get(level)
            if highest is None or (-most_bytes, peak) < (-highest[0], highest[1]):
                peaks[level] = (most_bytes, peak)
    levels = []
    for path in sorted(
        peaks, key=lambda path: tuple(entered[path[:depth]] for depth in range(len(path) + 1))
    ):
        most_bytes, peak = peaks[path]
        inner_bytes = bound_bytes(
            (use.bytes, use.partitions)
            for use in uses
            if use.first_use <= peak <= use.last_use and sources[use.source].loops[: len(path)] == path
        )
        levels.append(Level(path, counts[path], most_bytes, inner_bytes, peak))
    return tuple(levels)

"""Tile rotation: which events wait for room in SBUF or PSUM, because a tile takes the bytes of an earlier one.

A loop that allocates a tile in each iteration gets a new tile each time, and iterations overlap as far as memory
allows. Policy: a tile takes the bytes that have been free longest. Those are first the bytes never used, then the
bytes of the tile whose last use, in program order, is longest ago. The first writer of a new tile waits until all
users of the old tiles have finished; the other writers wait until the first one starts. Bytes are counted per quadrant
over the whole memory; how a compiler packs them is not published. A tile on 64 or fewer partitions takes the half or
the quadrant whose bytes have been free longest, of equals the one with most free bytes, and others may lie beside it,
as in `simulate.memory.placement`. A tile with an `address=` waits for the earlier tiles at the same address.

These waits follow from the stream alone, never from times, so a lower cost lengthens no schedule by them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from simulate.hardware import Hardware
from simulate.memory import MemoryRegion
from simulate.memory.placement import QUADRANTS, choices
from simulate.run.stream import Stream
from simulate.timing.dependences import Dependences, Wait

_START = int(Wait.start)


def with_room(streams: Sequence[Stream], hardware: Hardware, waits: Dependences) -> Dependences:
    """The dependences, and with them the waits for room. They are worked out once, as no time decides them."""
    sizes = (
        hardware.sbuf_usable_bytes_per_partition,
        hardware.psum_bytes_per_partition,
        hardware.partitions,
    )
    known = waits.with_room.get(sizes)
    if known is None:
        known = waits.with_room[sizes] = waits.and_more(*_for_room(streams, hardware, waits))
    return known


def _for_room(
    streams: Sequence[Stream], hardware: Hardware, waits: Dependences
) -> tuple[list[int], list[int]]:
    """The waits for room, and the events that wait, as `Dependences.and_more` takes them."""
    owners: list[int] = []
    packed: list[int] = []
    for number, stream in enumerate(streams):
        for buffer in (MemoryRegion.sbuf, MemoryRegion.psum):
            for new, old in _taken(stream, hardware, buffer):
                entering = waits.uses.first(number, new)
                if not entering:
                    continue
                owners += entering[1:]
                packed += [entering[0] * 4 + _START] * (len(entering) - 1)
                releases = len(packed)
                for tile in old:
                    packed += waits.uses.last(number, tile)
                owners += [entering[0]] * (len(packed) - releases)
    return owners, packed


def _taken(stream: Stream, hardware: Hardware, buffer: MemoryRegion) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every tile that takes bytes of earlier tiles, with those tiles."""
    limit = hardware.sbuf_usable_bytes_per_partition
    if buffer is MemoryRegion.psum:
        limit = hardware.psum_bytes_per_partition
    records = stream.tensors
    first, last = stream.first_use, stream.last_use
    tiles = sorted((first[tile], tile) for tile in first if records[tile].buffer is buffer)
    fixed = [tile for _, tile in tiles if records[tile].address is not None]
    yield from _at_addresses(stream, fixed)
    floating = [(start, tile) for start, tile in tiles if records[tile].address is None]
    shares = max((len(choices(records[tile].shape[0])) for _, tile in floating), default=1)
    free = [_Free(size) for size in _beside(stream, fixed, limit, hardware.partitions // shares, shares)]
    if sum(records[tile].row_bytes for _, tile in floating) <= min(share.bytes for share in free):
        return
    live: list[tuple[int, int, dict[int, int]]] = []  # last use, tile, bytes by share
    for start, tile in floating:
        while live and live[0][0] < start:
            end, ended, given = heappop(live)
            for number, size in given.items():
                free[number].give(size, end, ended)
        need = records[tile].row_bytes
        chosen = min(
            (
                range(one.start * shares // QUADRANTS, -(-one.stop * shares // QUADRANTS))
                for one in choices(records[tile].shape[0])
            ),
            key=lambda numbers: max(free[number].freed(need) for number in numbers),
        )
        # Less than it needs where the live tiles, placed in this order, leave gaps: no wait would close them.
        taken = {number: min(need, free[number].bytes) for number in chosen}
        old = dict.fromkeys(owner for number in chosen for owner in free[number].take(need))
        heappush(live, (last[tile], tile, taken))
        if old:
            yield tile, tuple(old)


def _beside(stream: Stream, fixed: Sequence[int], limit: int, partitions: int, shares: int) -> Iterator[int]:
    """The bytes of each share of so many partitions beyond the tiles at addresses."""
    for start in range(0, shares * partitions, partitions):
        there = (tile for tile in fixed if _overlap(_rows_of(stream, tile), (start, start + partitions)))
        yield max(0, limit - max((_bytes_of(stream, tile)[1] for tile in there), default=0))


class _Free:
    """The free bytes of each partition of a share of the memory, the longest free first."""

    def __init__(self, limit: int) -> None:
        self.bytes = limit
        self._pieces = deque([(limit, -1, -1)])  # bytes, last use and number of the tile that had them

    def give(self, size: int, last_use: int, tile: int) -> None:
        """Take back the bytes of a tile."""
        self.bytes += size
        self._pieces.append((size, last_use, tile))

    def freed(self, need: int) -> tuple[float, int]:
        """When `need` bytes were free, as an event: -1 if always, infinity if not yet. Then the free bytes, negated."""
        for size, last_use, _ in self._pieces:
            need -= size
            if need <= 0:
                return last_use, -self.bytes
        return inf, -self.bytes

    def take(self, need: int) -> Iterator[int]:
        """Take bytes, as far as there are any; the tiles that had them."""
        while need > 0 and self._pieces:
            size, last_use, owner = self._pieces.popleft()
            if size > need:
                self._pieces.appendleft((size - need, last_use, owner))
            self.bytes -= min(size, need)
            if owner >= 0:
                yield owner
            need -= size


def _at_addresses(stream: Stream, tiles: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    there: list[int] = []
    for tile in tiles:
        rows, columns = _rows_of(stream, tile), _bytes_of(stream, tile)
        old = [
            other
            for other in there
            if stream.last_use[other] < stream.first_use[tile]
            and _overlap(rows, _rows_of(stream, other))
            and _overlap(columns, _bytes_of(stream, other))
        ]
        # A tile that overlaps a covered one overlaps its successor as well.
        hidden = {
            other
            for other in old
            if _within(_rows_of(stream, other), rows) and _within(_bytes_of(stream, other), columns)
        }
        there = [other for other in there if other not in hidden]
        there.append(tile)
        if old:
            yield tile, tuple(old)


def _rows_of(stream: Stream, tile: int) -> tuple[int, int]:
    record = stream.tensors[tile]
    first = record.address[0] if record.address else 0
    return first, first + record.shape[0]


def _bytes_of(stream: Stream, tile: int) -> tuple[int, int]:
    record = stream.tensors[tile]
    first = record.address[1] if record.address else 0
    return first, first + record.row_bytes


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _within(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]

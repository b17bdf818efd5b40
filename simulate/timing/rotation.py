"""Tile rotation: which events wait for room in SBUF or PSUM, because a tile takes the bytes of an earlier tile.

A loop that allocates a tile in each iteration gets a new tile each time, and iterations overlap as far as memory
allows. Policy: a tile takes the bytes that have been free longest. Those are first the bytes never used, then the
bytes of the tile whose last use, in program order, is longest ago. The first writer of a new tile waits until all
users of the old tiles have finished; all other writers wait until the first starts. Bytes are counted for each quadrant
over the whole memory; how a compiler packs them is not published. A tile on 64 or fewer partitions takes the half or
the quadrant whose bytes have been free longest; of equals that with most free bytes. Other tiles may be on the other
partitions, as in `simulate.memory.placement`. A tile with an `address=` waits for the earlier tiles at that address.

These waits follow from the stream alone, never from times, so a lower cost lengthens no schedule by them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from simulate.hardware import Hardware
from simulate.memory import MemoryRegion
from simulate.memory.placement import QUADRANTS, quadrant_choices
from simulate.run.stream import Stream
from simulate.timing.dependences import Dependences, Wait

_START = int(Wait.start)


def with_room(streams: Sequence[Stream], hardware: Hardware, waits: Dependences) -> Dependences:
    """Return the dependences with the waits for room, which are computed once because they depend on no time."""
    sizes = (
        hardware.sbuf_usable_bytes_per_partition,
        hardware.psum_bytes_per_partition,
        hardware.partitions,
    )
    extended = waits.with_room.get(sizes)
    if extended is None:
        extended = waits.with_room[sizes] = waits.extended(*_find_waits(streams, hardware, waits))
    return extended


def _find_waits(
    streams: Sequence[Stream], hardware: Hardware, waits: Dependences
) -> tuple[list[int], list[int]]:
    """Return the events that wait for room and their dependences, as `Dependences.extended` takes them."""
    owners: list[int] = []
    packed: list[int] = []
    for number, stream in enumerate(streams):
        for buffer in (MemoryRegion.sbuf, MemoryRegion.psum):
            for new, old in _find_successors(stream, hardware, buffer):
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


def _find_successors(
    stream: Stream, hardware: Hardware, buffer: MemoryRegion
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield every tile that takes bytes of earlier tiles, with those tiles."""
    limit = hardware.sbuf_usable_bytes_per_partition
    if buffer is MemoryRegion.psum:
        limit = hardware.psum_bytes_per_partition
    records = stream.tensors
    first, last = stream.first_use, stream.last_use
    tiles = sorted((first[tile], tile) for tile in first if records[tile].buffer is buffer)
    fixed = [tile for _, tile in tiles if records[tile].address is not None]
    yield from _find_at_addresses(stream, fixed)
    floating = [(start, tile) for start, tile in tiles if records[tile].address is None]
    shares = max((len(quadrant_choices(records[tile].shape[0])) for _, tile in floating), default=1)
    free = [
        _Free(size)
        for size in _free_beyond_fixed(stream, fixed, limit, hardware.partitions // shares, shares)
    ]
    if sum(records[tile].row_bytes for _, tile in floating) <= min(share.bytes for share in free):
        return
    live: list[tuple[int, int, dict[int, int]]] = []  # last use, tile, bytes by share
    for start, tile in floating:
        while live and live[0][0] < start:
            end, ended, released = heappop(live)
            for number, size in released.items():
                free[number].give(size, end, ended)
        need = records[tile].row_bytes
        chosen = min(
            (
                range(quadrants.start * shares // QUADRANTS, -(-quadrants.stop * shares // QUADRANTS))
                for quadrants in quadrant_choices(records[tile].shape[0])
            ),
            key=lambda numbers: max(free[number].freed(need) for number in numbers),
        )
        # Less than the tile needs if the live tiles, placed in this order, leave gaps: no wait would close them.
        taken = {number: min(need, free[number].bytes) for number in chosen}
        old = dict.fromkeys(owner for number in chosen for owner in free[number].take(need))
        heappush(live, (last[tile], tile, taken))
        if old:
            yield tile, tuple(old)


def _free_beyond_fixed(
    stream: Stream, fixed: Sequence[int], limit: int, partitions: int, shares: int
) -> Iterator[int]:
    """Yield the bytes of each share of the partitions beyond the tiles at fixed addresses.

    Args:
        stream: The stream.
        fixed: The tiles at addresses.
        limit: The usable bytes of a partition.
        partitions: The number of partitions of a share.
        shares: The number of shares.
    """
    for start in range(0, shares * partitions, partitions):
        overlapping = (
            tile for tile in fixed if _overlap(_rows_of(stream, tile), (start, start + partitions))
        )
        yield max(0, limit - max((_bytes_of(stream, tile)[1] for tile in overlapping), default=0))


class _Free:
    """Free bytes of each partition of a share of the memory, the longest free first."""

    def __init__(self, limit: int) -> None:
        self.bytes = limit
        self._pieces = deque([(limit, -1, -1)])  # bytes, last use and number of the tile that had them

    def give(self, size: int, last_use: int, tile: int) -> None:
        """Add the bytes of a tile to the free bytes."""
        self.bytes += size
        self._pieces.append((size, last_use, tile))

    def freed(self, need: int) -> tuple[float, int]:
        """Return since when `need` bytes are free, and the negated number of free bytes.

        The first is the event of the last use: -1 for bytes never used, infinity if there are not enough.
        """
        for size, last_use, _ in self._pieces:
            need -= size
            if need <= 0:
                return last_use, -self.bytes
        return inf, -self.bytes

    def take(self, need: int) -> Iterator[int]:
        """Take free bytes, as many as there are; yield the tiles that had them."""
        while need > 0 and self._pieces:
            size, last_use, owner = self._pieces.popleft()
            if size > need:
                self._pieces.appendleft((size - need, last_use, owner))
            self.bytes -= min(size, need)
            if owner >= 0:
                yield owner
            need -= size


def _find_at_addresses(stream: Stream, tiles: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    visible: list[int] = []
    for tile in tiles:
        rows, columns = _rows_of(stream, tile), _bytes_of(stream, tile)
        old = [
            earlier
            for earlier in visible
            if stream.last_use[earlier] < stream.first_use[tile]
            and _overlap(rows, _rows_of(stream, earlier))
            and _overlap(columns, _bytes_of(stream, earlier))
        ]
        # A tile that overlaps a covered one overlaps its successor as well.
        hidden = {
            earlier
            for earlier in old
            if _within(_rows_of(stream, earlier), rows) and _within(_bytes_of(stream, earlier), columns)
        }
        visible = [earlier for earlier in visible if earlier not in hidden]
        visible.append(tile)
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

"""Tile rotation: which events wait for room in SBUF or PSUM, because a tile takes the bytes of an earlier tile.

A loop that allocates a tile in each iteration gets a new tile each time, and iterations overlap as far as memory
allows. Policy: a tile takes the bytes that have been free longest. Those are first the bytes never used, then the
bytes of the tile whose last use, in program order, is longest ago. The first writer of a new tile waits until all
users of the old tiles have finished; all other writers wait until the first starts. Bytes are counted for each quadrant
over the whole memory; how a compiler packs them is not published. A tile on 64 or fewer partitions takes the half or
the quadrant whose bytes have been free longest; of equals that with most free bytes. Other tiles may be on the other
partitions, as in `simulate.memory.placement`. A tile with an `address=` waits for the earlier tiles at that address.

A share is one of 1, 2 or 4 equal groups of partitions whose bytes are counted separately: as many as the smallest tile
of the memory needs. Tiles are given by their serial numbers in the stream.

These waits follow from the stream alone, never from times, so a lower cost lengthens no schedule by them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from simulate.hardware import Hardware
from simulate.memory import MemoryRegion
from simulate.memory.placement import QUADRANTS, list_quadrant_choices
from simulate.run.stream import Stream
from simulate.timing.dependences import Dependences, Wait

_START = int(Wait.start)


def add_room_waits(streams: Sequence[Stream], hardware: Hardware, waits: Dependences) -> Dependences:
    """Return the dependences, extended by the waits of new tiles for the bytes of earlier tiles in SBUF and PSUM.

    The result is kept in `waits.with_room` by the sizes of the memories, since it depends on no time.
    """
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
    """Find the dependences of the writers of new tiles on the users of the tiles whose bytes they take.

    Returns:
        The events that wait and, for each, producer * 4 + Wait; as `Dependences.extended` takes them.
    """
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
    """Yield (tile, earlier tiles) for every tile in SBUF or PSUM that takes bytes which earlier tiles had.

    Tiles with an `address=` come first, then the others by first use. Nothing is yielded for the others if all of them
    fit at the same time.
    """
    limit = hardware.sbuf_usable_bytes_per_partition
    if buffer is MemoryRegion.psum:
        limit = hardware.psum_bytes_per_partition
    records = stream.tensors
    first, last = stream.first_use, stream.last_use
    tiles = sorted((first[tile], tile) for tile in first if records[tile].buffer is buffer)
    fixed = [tile for _, tile in tiles if records[tile].address is not None]
    yield from _find_at_addresses(stream, fixed)
    floating = [(start, tile) for start, tile in tiles if records[tile].address is None]
    shares = max((len(list_quadrant_choices(records[tile].shape[0])) for _, tile in floating), default=1)
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
                free[number].release(size, end, ended)
        need = records[tile].row_bytes
        chosen = min(
            (
                range(quadrants.start * shares // QUADRANTS, -(-quadrants.stop * shares // QUADRANTS))
                for quadrants in list_quadrant_choices(records[tile].shape[0])
            ),
            key=lambda numbers: max(free[number].find_free_since(need) for number in numbers),
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
    """Yield for each share the bytes per partition after the last tile with an `address=` there, at least 0.

    Args:
        stream: The stream.
        fixed: The tiles with an `address=`, by serial number.
        limit: The usable bytes of a partition.
        partitions: The number of partitions of a share.
        shares: The number of shares.
    """
    for start in range(0, shares * partitions, partitions):
        overlapping = (
            tile for tile in fixed if _overlap(_get_partitions(stream, tile), (start, start + partitions))
        )
        yield max(0, limit - max((_get_byte_range(stream, tile)[1] for tile in overlapping), default=0))


class _Free:
    """Free bytes per partition of one share of the memory, in order of the time since which they are free.

    `bytes` is their number. Each piece knows the tile that had it and the tile's last use; both are -1 for bytes that
    no tile had.
    """

    def __init__(self, limit: int) -> None:
        self.bytes = limit
        self._pieces = deque([(limit, -1, -1)])  # bytes, last use and number of the tile that had them

    def release(self, size: int, last_use: int, tile: int) -> None:
        """Add the `size` bytes that a tile had to the free bytes; `last_use` is the tile's last event."""
        self.bytes += size
        self._pieces.append((size, last_use, tile))

    def find_free_since(self, need: int) -> tuple[float, int]:
        """Return a key by which the share whose bytes have been free longest comes first, without taking any bytes.

        Returns:
            The event since which `need` bytes are free: -1 for bytes that no tile had, infinity if fewer are free. Then
            the negated number of free bytes, so that of equal shares the one with more comes first.
        """
        for size, last_use, _ in self._pieces:
            need -= size
            if need <= 0:
                return last_use, -self.bytes
        return inf, -self.bytes

    def take(self, need: int) -> Iterator[int]:
        """Take `need` bytes, or all if fewer are free, longest free first; yield the tiles that had them.

        Bytes are taken while the iterator is consumed.
        """
        while need > 0 and self._pieces:
            size, last_use, owner = self._pieces.popleft()
            if size > need:
                self._pieces.appendleft((size - need, last_use, owner))
            self.bytes -= min(size, need)
            if owner >= 0:
                yield owner
            need -= size


def _find_at_addresses(stream: Stream, tiles: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (tile, earlier tiles) for every tile with an `address=` that overlaps tiles whose last use was before.

    Earlier tiles that a later tile covered completely are left out: waiting for the later tile is enough.

    Args:
        stream: The stream.
        tiles: The tiles with an `address=`, in order of first use.
    """
    visible: list[int] = []
    for tile in tiles:
        rows, columns = _get_partitions(stream, tile), _get_byte_range(stream, tile)
        old = [
            earlier
            for earlier in visible
            if stream.last_use[earlier] < stream.first_use[tile]
            and _overlap(rows, _get_partitions(stream, earlier))
            and _overlap(columns, _get_byte_range(stream, earlier))
        ]
        # A tile that overlaps a covered one overlaps its successor as well.
        hidden = {
            earlier
            for earlier in old
            if _within(_get_partitions(stream, earlier), rows)
            and _within(_get_byte_range(stream, earlier), columns)
        }
        visible = [earlier for earlier in visible if earlier not in hidden]
        visible.append(tile)
        if old:
            yield tile, tuple(old)


def _get_partitions(stream: Stream, tile: int) -> tuple[int, int]:
    """Return the first partition of a tile and the partition after its last; from 0 without an `address=`."""
    record = stream.tensors[tile]
    first = record.address[0] if record.address else 0
    return first, first + record.shape[0]


def _get_byte_range(stream: Stream, tile: int) -> tuple[int, int]:
    """Return the first byte of a tile in a partition and the byte after its last; from 0 without an `address=`."""
    record = stream.tensors[tile]
    first = record.address[1] if record.address else 0
    return first, first + record.row_bytes


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether two half-open ranges have an element in common."""
    return one[0] < other[1] and other[0] < one[1]


def _within(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether the second half-open range contains the first."""
    return other[0] <= one[0] and one[1] <= other[1]

"""Tile rotation: which events wait for room in SBUF or PSUM, because a tile takes the bytes of an earlier one.

A loop that allocates a tile in each iteration gets a new tile each time, and iterations overlap as far as memory
allows. Policy: a tile takes the bytes that have been free longest. Those are first the bytes never used, then the
bytes of the tile whose last use, in program order, is longest ago. The first writer of a new tile waits until all
users of the old tiles have finished; the other writers wait until the first one starts. Bytes are counted per partition
over the whole memory; how a compiler packs them is not published. A tile with an `address=` waits for the earlier tiles
at the same address.

These waits follow from the stream alone, never from times, so a lower cost lengthens no schedule by them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from simulate.hardware import Hardware
from simulate.memory import MemoryRegion
from simulate.run.stream import Stream
from simulate.timing.dependences import Dependences, Wait

_START = int(Wait.start)


def with_room(streams: Sequence[Stream], hardware: Hardware, waits: Dependences) -> Dependences:
    """The dependences, and with them the waits for room."""
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
    return waits.and_more(owners, packed)


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
    limit -= max((_bytes_of(stream, tile)[1] for tile in fixed), default=0)
    floating = [(start, tile) for start, tile in tiles if records[tile].address is None]
    if sum(records[tile].row_bytes for _, tile in floating) <= limit:
        return
    free: deque[tuple[int, int]] = deque(
        [(limit, -1)]
    )  # bytes and the tile that had them, the longest free first
    live: list[tuple[int, int]] = []
    for start, tile in floating:
        while live and live[0][0] < start:
            ended = heappop(live)[1]
            free.append((records[ended].row_bytes, ended))
        need = records[tile].row_bytes
        old = []
        while need > 0 and free:
            size, owner = free.popleft()
            if size > need:
                free.appendleft((size - need, owner))
            if owner >= 0:
                old.append(owner)
            need -= size
        heappush(live, (last[tile], tile))
        if old:
            yield tile, tuple(old)


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

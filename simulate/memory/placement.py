"""The places of a launch's tiles in SBUF and PSUM, and whether the tiles fit.

The compiler gives a tile its bytes from its first to its last use. Here tiles are placed first fit in the order of
their first use, over the same live ranges; tiles with an `address=` stay where they were put. Partitions come in
quadrants of 32: a tile on 64 or fewer partitions starts at 0 or 64, one on 32 or fewer at 0, 32, 64 or 96, and others
may lie beside it. The high-water mark is the highest byte in use. First fit is not optimal: a run that does not fit
here may still be packed by the compiler, but never one whose live bytes alone exceed the memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from nkw.errors import RuleViolation, rule
from simulate.memory.regions import MemoryRegion

_Taken = tuple[int, int, int, int]
"""Bytes that a tile has: first, end, its last use, and the quadrants whose bits are set."""


@dataclass(frozen=True, slots=True)
class Tile:
    """An on-chip allocation as placement sees it; `bytes` per partition, uses as event numbers.

    Tiles of one `source`, a line of the kernel that ran several times, have their size from there and change together.
    `first_partition` counts for a tile with an address.
    """

    serial: int
    bytes: int
    first_use: int
    last_use: int
    address: int | None
    source: Hashable = None
    partitions: int = 128
    first_partition: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Byte offset and first partition of every tile, the high-water mark, and the most bytes live at once.

    `peak` are the tiles that were live when most bytes were, for the first time, in order of their first use.
    """

    offsets: dict[int, int]
    first_partitions: dict[int, int]
    high_water_bytes: int
    live_bytes: int
    peak: tuple[Tile, ...]
    tiles: tuple[Tile, ...]
    bank_bytes: int | None


_ALIGNMENT = 4  # bytes; every dtype of the API is aligned then
QUADRANTS = 4
_QUADRANT = 32  # partitions
_ALL = (1 << QUADRANTS) - 1
_STARTS = ((), (0, 32, 64, 96), (0, 64), (0,), (0,))
"""The partitions at which a tile of so many quadrants may start."""


def place(tiles: Iterable[Tile], bank_bytes: int | None = None) -> Placement:
    """Place tiles first fit; with `bank_bytes` a tile that fits into one bank never straddles two."""
    ordered = sorted(tiles, key=lambda tile: (tile.first_use, tile.serial))
    fixed = [tile for tile in ordered if tile.address is not None]
    addressed = [_taken(tile, tile.address or 0, tile.first_partition) for tile in fixed]
    begins = [tile.first_use for tile in fixed]
    offsets: dict[int, int] = {}
    partitions: dict[int, int] = {}
    live: list[_Taken] = []  # kept sorted by start
    ending: list[tuple[int, int, _Taken]] = []  # a heap: last use, serial, entry of `live`
    members: dict[int, Tile] = {}
    high = most = total = 0
    peak: tuple[Tile, ...] = ()
    for tile in ordered:
        while ending and ending[0][0] < tile.first_use:
            _, serial, entry = heappop(ending)
            del live[bisect_left(live, entry)]
            total -= members.pop(serial).bytes
        if tile.address is not None:
            start, first = tile.address, tile.first_partition
        else:
            taken = live
            if fixed:
                later = slice(bisect_left(begins, tile.first_use), bisect_right(begins, tile.last_use))
                taken = sorted([*live, *addressed[later]])
            start, first = min(
                [
                    (_first_gap(_beside(taken, _bits(at, tile.partitions)), tile.bytes, bank_bytes), at)
                    for at in _STARTS[_quadrants(tile.partitions)]
                ]
            )
        offsets[tile.serial], partitions[tile.serial] = start, first
        entry = _taken(tile, start, first)
        insort(live, entry)
        heappush(ending, (tile.last_use, tile.serial, entry))
        members[tile.serial] = tile
        high = max(high, start + tile.bytes)
        total += tile.bytes
        if total > most:
            least = least_bytes((other.bytes, other.partitions) for other in members.values())
            if least > most:
                most, peak = least, tuple(members.values())
    return Placement(offsets, partitions, high, most, peak, tuple(ordered), bank_bytes)


def _taken(tile: Tile, start: int, first_partition: int) -> _Taken:
    return start, start + tile.bytes, tile.last_use, _bits(first_partition, tile.partitions)


def _beside(taken: list[_Taken], quadrants: int) -> list[_Taken]:
    """The bytes that a tile in these quadrants must go around."""
    if quadrants == _ALL:
        return taken
    return [entry for entry in taken if entry[3] & quadrants]


def _bits(first_partition: int, partitions: int) -> int:
    first, end = first_partition // _QUADRANT, _quadrants(first_partition + partitions)
    return (1 << end) - (1 << first)


def _quadrants(partitions: int) -> int:
    return -(-partitions // _QUADRANT)


def choices(partitions: int) -> list[range]:
    """The quadrants that a tile on so many partitions may take, one range for each start."""
    count = _quadrants(partitions)
    return [range(at // _QUADRANT, at // _QUADRANT + count) for at in _STARTS[count]]


def least_bytes(tiles: Iterable[tuple[int, int]]) -> int:
    """The fewest bytes of a partition that hold tiles (bytes, partitions) at one time, however they are packed.

    A lower bound: tiles on more than 64 partitions lie one after another, those on 64 or fewer share two halves, those
    on 32 or fewer four quadrants; and all of them fill their share of the memory.
    """
    by_quadrants: list[list[int]] = [[] for _ in range(QUADRANTS + 1)]
    for size, partitions in tiles:
        by_quadrants[_quadrants(partitions)].append(size)
    quarters, halves, wide, whole = (by_quadrants[n] for n in (1, 2, 3, 4))
    stacked = sum(whole)
    if not (quarters or halves or wide):
        return stacked
    area = sum(quadrants * sum(sizes) for quadrants, sizes in enumerate(by_quadrants))
    return max(
        stacked + sum(wide) + _shared(halves, 2), stacked + _shared(quarters, 4), -(-area // QUADRANTS)
    )


def _shared(sizes: list[int], places: int) -> int:
    """A bound of the largest sum where sizes are shared out: of n * places + 1 of them, n + 1 are in one place."""
    ordered = sorted(sizes, reverse=True)
    bound = -(-sum(sizes) // places)
    for n in range((len(ordered) - 1) // places + 1):
        bound = max(bound, sum(ordered[(places - 1) * n : places * n + 1]))
    return bound


def same_source(tiles: Iterable[Tile], one: Tile) -> set[int]:
    """The serials of the tiles that change their size together with `one`."""
    if one.source is None:
        return {one.serial}
    return {tile.serial for tile in tiles if tile.source == one.source}


def to_blame(placement: Placement) -> Tile:
    """Of the tiles at the peak one of the source that has most of the bytes; of equal ones the last."""
    taken: dict[Hashable, int] = {}
    for tile in placement.peak:
        source = tile.serial if tile.source is None else tile.source
        taken[source] = taken.get(source, 0) + tile.bytes
    return max(
        reversed(placement.peak), key=lambda tile: taken[tile.serial if tile.source is None else tile.source]
    )


def room(tiles: Collection[Tile], chosen: Collection[int], limit: int) -> int:
    """The most bytes that each tile of `chosen` (serials) may have for all live bytes to stay within `limit`.

    Exact for tiles on more than 64 partitions; smaller ones may need more than their share. Negative where the other
    tiles alone exceed the limit while one of `chosen` is live.
    """
    most = limit
    for weight in (_stacked_quadrants, _quadrants):
        # At an event: the change of the others' bytes, and of the count of chosen tiles.
        changes: dict[int, list[int]] = {}
        for tile in tiles:
            column, amount = (1, 1) if tile.serial in chosen else (0, tile.bytes)
            amount *= weight(tile.partitions)
            changes.setdefault(tile.first_use, [0, 0])[column] += amount
            changes.setdefault(tile.last_use + 1, [0, 0])[column] -= amount
        others = count = 0
        for event in sorted(changes):
            others += changes[event][0]
            count += changes[event][1]
            if count:
                most = min(most, (QUADRANTS * limit - others) // count)
    return most


def _stacked_quadrants(partitions: int) -> int:
    """Of the first three quadrants' height in quarters, the least that a tile takes: one on a half shares it."""
    return (0, 0, 2, 4, 4)[_quadrants(partitions)]


def largest_fit(tiles: Iterable[Tile], chosen: Collection[int], limit: int, bank_bytes: int | None) -> int:
    """The bytes that each tile of `chosen` may have so that first fit places all tiles within `limit`; 0 if none.

    A multiple of the alignment. First fit is not monotone, so a larger size may fit as well where the live bytes alone
    would allow it.
    """
    tiles = tuple(tiles)

    def fits(units: int) -> bool:
        resized = (replace(t, bytes=units * _ALIGNMENT) if t.serial in chosen else t for t in tiles)
        return place(resized, bank_bytes).high_water_bytes <= limit

    high = max(0, room(tiles, chosen, limit)) // _ALIGNMENT
    if high == 0 or fits(high):
        return high * _ALIGNMENT
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * _ALIGNMENT


def _first_gap(taken: list[_Taken], size: int, bank_bytes: int | None) -> int:
    start = 0
    for begin, end, _, _ in taken:
        if begin - start >= size and begin - _aligned(start, size, bank_bytes) >= size:
            break
        if end > start:
            start = end
    return _aligned(start, size, bank_bytes)


def _aligned(start: int, size: int, bank_bytes: int | None) -> int:
    start = -(-start // _ALIGNMENT) * _ALIGNMENT
    if bank_bytes is None:
        return start
    crosses = start // bank_bytes != (start + min(size, bank_bytes) - 1) // bank_bytes
    return -(-start // bank_bytes) * bank_bytes if crosses or size > bank_bytes else start


_MOST_LISTED = 4


def _listed(tiles: Iterable[Tile], label: Callable[[int], str]) -> list[str]:
    """Tiles with their bytes, those of one label together."""
    counts = Counter((label(tile.serial), tile.bytes) for tile in tiles)
    return [
        f"{f'{count} times ' if count > 1 else ''}{name} {size} bytes{' each' if count > 1 else ''}"
        for (name, size), count in list(counts.items())[:_MOST_LISTED]
    ]


@rule("NKW-CAPACITY")
def live_tiles_fit(
    placement: Placement,
    buffer: MemoryRegion,
    limit: int,
    chip: str,
    label: Callable[[int], str],
    size: Callable[[int, int], str],
) -> None:
    """The tiles that are live at one time fit into the usable bytes of a partition.

    `label` names a tile by its serial; `size` words a number of its bytes.
    """
    if placement.live_bytes <= limit:
        return
    largest = sorted(placement.peak, key=lambda tile: -tile.bytes)
    taken, before = 0, []
    for first in placement.peak:
        before.append((first.bytes, first.partitions))
        taken = least_bytes(before)
        if taken > limit:
            break
    siblings = same_source(placement.tiles, largest[0])
    fitting = largest_fit(placement.tiles, siblings, limit, placement.bank_bytes)
    smaller = "make tiles smaller"
    if fitting > 0:
        now, then = size(largest[0].serial, largest[0].bytes), size(largest[0].serial, fitting)
        smaller = f"{then} per partition in place of {now} fit beside the other tiles"
    raise RuleViolation(
        live_tiles_fit,
        f"{len(placement.peak)} live tiles take {placement.live_bytes} bytes per partition of {buffer.value}, "
        f"{placement.live_bytes - limit} too many; the largest: "
        + "; ".join(_listed(largest, label))
        + f"; the first that does not fit: {label(first.serial)}, by {taken - limit} bytes",
        limit=f"{limit} usable bytes per partition on {chip}",
        hint=f"{smaller}, or end the use of one before the next is filled",
    )

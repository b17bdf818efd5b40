"""The places of a launch's tiles in SBUF and PSUM, and whether the tiles fit.

The compiler gives a tile its bytes from its first to its last use. Here tiles are placed first fit in the order of
their first use, over the same live ranges; tiles with an `address=` stay where they were put. The high-water mark is
the highest byte in use. First fit is not optimal: a run that does not fit here may still be packed by the compiler,
but never one whose live bytes alone exceed the memory.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, replace

from simulate.errors import RuleViolation, rule
from simulate.memory.regions import MemoryRegion


@dataclass(frozen=True, slots=True)
class Tile:
    """An on-chip allocation as placement sees it; `bytes` per partition, uses as event numbers.

    Tiles of one `source`, a line of the kernel that ran several times, have their size from there and change together.
    """

    serial: int
    bytes: int
    first_use: int
    last_use: int
    address: int | None
    source: Hashable = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Byte offset of every tile, the high-water mark, and the most bytes live at once.

    `peak` are the tiles that were live when most bytes were, for the first time, in order of their first use.
    """

    offsets: dict[int, int]
    high_water_bytes: int
    live_bytes: int
    peak: tuple[Tile, ...]
    tiles: tuple[Tile, ...]
    bank_bytes: int | None


_ALIGNMENT = 4  # bytes; every dtype of the API is aligned then


def place(tiles: Iterable[Tile], bank_bytes: int | None = None) -> Placement:
    """Place tiles first fit; with `bank_bytes` a tile that fits into one bank never straddles two."""
    ordered = sorted(tiles, key=lambda tile: (tile.first_use, tile.serial))
    fixed = [tile for tile in ordered if tile.address is not None]
    offsets: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []  # start byte, end byte, last use; kept sorted by start
    members: list[Tile] = []
    high = most = 0
    peak: tuple[Tile, ...] = ()
    for tile in ordered:
        live = [entry for entry in live if entry[2] >= tile.first_use]
        members = [other for other in members if other.last_use >= tile.first_use]
        if tile.address is not None:
            start = tile.address
        else:
            taken = list(live)
            for other in fixed:
                if other.first_use <= tile.last_use and other.last_use >= tile.first_use:
                    assert other.address is not None
                    insort(taken, (other.address, other.address + other.bytes, other.last_use))
            start = _first_gap(taken, tile.bytes, bank_bytes)
        offsets[tile.serial] = start
        insort(live, (start, start + tile.bytes, tile.last_use))
        members.append(tile)
        high = max(high, start + tile.bytes)
        total = sum(other.bytes for other in members)
        if total > most:
            most, peak = total, tuple(members)
    return Placement(offsets, high, most, peak, tuple(ordered), bank_bytes)


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


def room(tiles: Iterable[Tile], chosen: Collection[int], limit: int) -> int:
    """The most bytes that each tile of `chosen` (serials) may have for all live bytes to stay within `limit`.

    Negative where the other tiles alone exceed the limit while one of `chosen` is live.
    """
    changes: dict[int, list[int]] = {}  # at an event: change of the others' bytes, change of the chosen count
    for tile in tiles:
        column, amount = (1, 1) if tile.serial in chosen else (0, tile.bytes)
        changes.setdefault(tile.first_use, [0, 0])[column] += amount
        changes.setdefault(tile.last_use + 1, [0, 0])[column] -= amount
    most = limit
    others = count = 0
    for event in sorted(changes):
        others += changes[event][0]
        count += changes[event][1]
        if count:
            most = min(most, (limit - others) // count)
    return most


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


def _first_gap(taken: list[tuple[int, int, int]], size: int, bank_bytes: int | None) -> int:
    start = 0
    for begin, end, _ in taken:
        start = _aligned(start, size, bank_bytes)
        if start + size <= begin:
            return start
        start = max(start, end)
    return _aligned(start, size, bank_bytes)


def _aligned(start: int, size: int, bank_bytes: int | None) -> int:
    start = -(-start // _ALIGNMENT) * _ALIGNMENT
    if bank_bytes is None:
        return start
    crosses = start // bank_bytes != (start + min(size, bank_bytes) - 1) // bank_bytes
    return -(-start // bank_bytes) * bank_bytes if crosses or size > bank_bytes else start


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
    taken = 0
    for first in placement.peak:
        taken += first.bytes
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
        + "; ".join(f"{label(tile.serial)} {tile.bytes} bytes" for tile in largest[:4])
        + f"; the first that does not fit: {label(first.serial)}, by {taken - limit} bytes",
        limit=f"{limit} usable bytes per partition on {chip}",
        hint=f"{smaller}, or end the use of one before the next is filled",
    )

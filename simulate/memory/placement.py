"""Where the tiles of a run lie in SBUF and PSUM, and whether they fit.

The compiler gives a tile its bytes from its first to its last use. Here tiles are placed first fit in the order of
their first use, over the same live ranges; tiles with an `address=` stay where they were put. The high-water mark is
the highest byte in use. First fit is not optimal: a run that does not fit here may still be packed by the compiler,
but never one whose live bytes alone exceed the memory.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simulate.errors import RuleViolation, rule
from simulate.memory.regions import MemoryRegion


@dataclass(frozen=True, slots=True)
class Tile:
    """An on-chip allocation as placement sees it; `bytes` per partition, uses as event numbers."""

    serial: int
    bytes: int
    first_use: int
    last_use: int
    address: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """Byte offset of every tile, the high-water mark, and the most bytes live at once."""

    offsets: dict[int, int]
    high_water_bytes: int
    live_bytes: int
    peak: tuple[Tile, ...]


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
    return Placement(offsets, high, most, peak)


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
    placement: Placement, buffer: MemoryRegion, limit: int, chip: str, label: Callable[[int], str]
) -> None:
    """The tiles that are live at one time fit into the usable bytes of a partition."""
    if placement.live_bytes > limit:
        largest = sorted(placement.peak, key=lambda tile: -tile.bytes)[:4]
        raise RuleViolation(
            live_tiles_fit,
            f"{len(placement.peak)} live tiles take {placement.live_bytes} bytes per partition of {buffer.value}, "
            f"{placement.live_bytes - limit} too many; the largest: "
            + "; ".join(f"{label(tile.serial)} {tile.bytes} bytes" for tile in largest),
            limit=f"{limit} usable bytes per partition on {chip}",
            hint="make tiles smaller, or end the use of one before the next is filled",
        )

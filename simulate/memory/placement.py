"""Placement of a launch's tiles in SBUF or PSUM: byte offsets, high-water mark, and whether the tiles fit.

The compiler gives a tile its bytes from its first to its last use, its live range. Here tiles are placed first fit in
the order of their first use, over the same live ranges; tiles with an `address=` keep their address.

Partitions come in quadrants of 32. A tile on 64 or fewer partitions starts at partition 0 or 64, a tile on 32 or fewer
at 0, 32, 64 or 96. Another tile may have the same byte offsets on other quadrants. The high-water mark is the end of
the highest byte in use. First fit is not optimal: the compiler may still pack tiles that do not fit here, unless their
live bytes alone exceed the memory.
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
"""Bytes of a tile: first byte, end, last use, and a bit mask of its quadrants."""


@dataclass(frozen=True, slots=True)
class Tile:
    """On-chip allocation, as placement sees it.

    Attributes:
        serial: Number of the allocation within the launch.
        bytes: Bytes per partition.
        first_use: Number of the event that first uses it.
        last_use: Number of the event that last uses it.
        address: Byte offset in a partition that the kernel demands; None if the tile may be placed freely.
        source: Line of the kernel that allocates. Tiles of one source have equal sizes, which change together.
        partitions: Number of partitions.
        first_partition: First partition of a tile with an address; ignored for all others.
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
    """Result of `place_tiles`.

    Attributes:
        offsets: Byte offset of each tile in its partitions, by serial.
        first_partitions: First partition of each tile, by serial.
        high_water_bytes: End of the highest byte in use, per partition.
        live_bytes: Largest lower bound (`bound_bytes`) of the bytes per partition that are live at one time.
        peak: Tiles that are live when `live_bytes` is first reached, in the order of their first use.
        tiles: All tiles, in the order of their first use.
        bank_bytes: Bytes of a PSUM bank, None for SBUF.
    """

    offsets: dict[int, int]
    first_partitions: dict[int, int]
    high_water_bytes: int
    live_bytes: int
    peak: tuple[Tile, ...]
    tiles: tuple[Tile, ...]
    bank_bytes: int | None


_ALIGNMENT = 4  # bytes, a multiple of the size of every dtype of the API
QUADRANTS = 4
_QUADRANT = 32  # partitions
_ALL = (1 << QUADRANTS) - 1
_STARTS = ((), (0, 32, 64, 96), (0, 64), (0,), (0,))
"""Partitions at which a tile may start, by its number of quadrants."""


def place_tiles(tiles: Iterable[Tile], bank_bytes: int | None = None) -> Placement:
    """Return the placement of tiles by first fit, in the order of their first use, without regard to the memory's size.

    Args:
        tiles: The tiles of one memory of one core.
        bank_bytes: Bytes of a PSUM bank; a tile that fits into a bank never straddles two. None for SBUF.
    """
    ordered = sorted(tiles, key=lambda tile: (tile.first_use, tile.serial))
    fixed = [tile for tile in ordered if tile.address is not None]
    addressed = [_describe_bytes(tile, tile.address or 0, tile.first_partition) for tile in fixed]
    begins = [tile.first_use for tile in fixed]
    offsets: dict[int, int] = {}
    partitions: dict[int, int] = {}
    live: list[_Taken] = []  # sorted by start
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
            gaps = []
            for first in _STARTS[_count_quadrants(tile.partitions)]:
                in_quadrants = _select_in_quadrants(taken, _build_quadrant_mask(first, tile.partitions))
                gaps.append((_find_first_gap(in_quadrants, tile.bytes, bank_bytes), first))
            start, first = min(gaps)
        offsets[tile.serial], partitions[tile.serial] = start, first
        entry = _describe_bytes(tile, start, first)
        insort(live, entry)
        heappush(ending, (tile.last_use, tile.serial, entry))
        members[tile.serial] = tile
        high = max(high, start + tile.bytes)
        total += tile.bytes
        if total > most:
            least = bound_bytes((member.bytes, member.partitions) for member in members.values())
            if least > most:
                most, peak = least, tuple(members.values())
    return Placement(offsets, partitions, high, most, peak, tuple(ordered), bank_bytes)


def _describe_bytes(tile: Tile, start: int, first_partition: int) -> _Taken:
    return start, start + tile.bytes, tile.last_use, _build_quadrant_mask(first_partition, tile.partitions)


def _select_in_quadrants(taken: list[_Taken], quadrants: int) -> list[_Taken]:
    """Return the entries of `taken` that have bytes in any quadrant of the bit mask `quadrants`."""
    if quadrants == _ALL:
        return taken
    return [entry for entry in taken if entry[3] & quadrants]


def _build_quadrant_mask(first_partition: int, partitions: int) -> int:
    first, end = first_partition // _QUADRANT, _count_quadrants(first_partition + partitions)
    return (1 << end) - (1 << first)


def _count_quadrants(partitions: int) -> int:
    return -(-partitions // _QUADRANT)


def list_quadrant_choices(partitions: int) -> list[range]:
    """Return the quadrants that a tile of so many partitions may take, one range for each possible first partition."""
    count = _count_quadrants(partitions)
    return [range(start // _QUADRANT, start // _QUADRANT + count) for start in _STARTS[count]]


def bound_bytes(tiles: Iterable[tuple[int, int]]) -> int:
    """Return a lower bound of the bytes per partition that tiles need if all are live, however they are packed.

    Tiles on more than 64 partitions need separate bytes. Tiles on 33 to 64 partitions can share bytes between two
    halves of the partitions, those on 32 or fewer between four quadrants.

    Args:
        tiles: (bytes per partition, number of partitions) of each tile.
    """
    by_quadrants: list[list[int]] = [[] for _ in range(QUADRANTS + 1)]
    for size, partitions in tiles:
        by_quadrants[_count_quadrants(partitions)].append(size)
    quarters, halves, wide, full = (by_quadrants[n] for n in (1, 2, 3, 4))
    stacked = sum(full)
    if not (quarters or halves or wide):
        return stacked
    area = sum(quadrants * sum(sizes) for quadrants, sizes in enumerate(by_quadrants))
    return max(
        stacked + sum(wide) + _bound_largest_bin(halves, 2),
        stacked + _bound_largest_bin(quarters, 4),
        -(-area // QUADRANTS),
    )


def _bound_largest_bin(sizes: list[int], bins: int) -> int:
    """Return a lower bound of the fullest bin's sum if sizes are distributed over `bins` bins.

    Of n * bins + 1 sizes, n + 1 are in the same bin.
    """
    ordered = sorted(sizes, reverse=True)
    bound = -(-sum(sizes) // bins)
    for n in range((len(ordered) - 1) // bins + 1):
        bound = max(bound, sum(ordered[(bins - 1) * n : bins * n + 1]))
    return bound


def find_siblings(tiles: Iterable[Tile], reference: Tile) -> set[int]:
    """Return the serials of all tiles that the reference tile's line of the kernel allocated, its own included."""
    if reference.source is None:
        return {reference.serial}
    return {tile.serial for tile in tiles if tile.source == reference.source}


def choose_blamed(placement: Placement) -> Tile:
    """Return a tile of the line that has most of the bytes at the placement's peak; of equal lines the last."""
    taken: dict[Hashable, int] = {}
    for tile in placement.peak:
        source = tile.serial if tile.source is None else tile.source
        taken[source] = taken.get(source, 0) + tile.bytes
    return max(
        reversed(placement.peak), key=lambda tile: taken[tile.serial if tile.source is None else tile.source]
    )


def find_largest_size(tiles: Collection[Tile], chosen: Collection[int], limit: int) -> int:
    """Return the largest bytes per partition that each chosen tile may have so that live bytes stay within the limit.

    Exact for tiles on more than 64 partitions; smaller tiles may need more than their share. The result is negative if
    the remaining tiles alone exceed the limit while a chosen tile is live.

    Args:
        tiles: All tiles.
        chosen: Serials of the tiles that change their size, all to the same number of bytes.
        limit: Usable bytes of a partition.
    """
    most = limit
    for weight in (_stacked_quadrants, _count_quadrants):
        # At an event: the change of the remaining tiles' bytes, and of the number of chosen tiles.
        changes: dict[int, list[int]] = {}
        for tile in tiles:
            column, amount = (1, 1) if tile.serial in chosen else (0, tile.bytes)
            amount *= weight(tile.partitions)
            changes.setdefault(tile.first_use, [0, 0])[column] += amount
            changes.setdefault(tile.last_use + 1, [0, 0])[column] -= amount
        remaining_bytes = count = 0
        for event in sorted(changes):
            remaining_bytes += changes[event][0]
            count += changes[event][1]
            if count:
                most = min(most, (QUADRANTS * limit - remaining_bytes) // count)
    return most


def _stacked_quadrants(partitions: int) -> int:
    """Return the weight of a tile in `find_largest_size`, in quarters of its bytes.

    It is 4 for more than 64 partitions, whose tiles share no bytes; 2 for 33 to 64, of which two tiles can share bytes;
    and 0 for 32 or fewer.
    """
    return (0, 0, 2, 4, 4)[_count_quadrants(partitions)]


def find_largest_fit(
    tiles: Iterable[Tile], chosen: Collection[int], limit: int, bank_bytes: int | None
) -> int:
    """Return the largest bytes per partition of each chosen tile with which first fit stays within the limit, else 0.

    The result is a multiple of 4 bytes. First fit is not monotone, so a larger size may fit as well if the live bytes
    alone allow it.

    Args:
        tiles: All tiles.
        chosen: Serials of the tiles that change their size, all to the same number of bytes.
        limit: Usable bytes of a partition.
        bank_bytes: Bytes of a PSUM bank, None for SBUF; as for `place_tiles`.
    """
    tiles = tuple(tiles)

    def fits(units: int) -> bool:
        resized = (replace(t, bytes=units * _ALIGNMENT) if t.serial in chosen else t for t in tiles)
        return place_tiles(resized, bank_bytes).high_water_bytes <= limit

    high = max(0, find_largest_size(tiles, chosen, limit)) // _ALIGNMENT
    if high == 0 or fits(high):
        return high * _ALIGNMENT
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * _ALIGNMENT


def _find_first_gap(taken: list[_Taken], size: int, bank_bytes: int | None) -> int:
    start = 0
    for begin, end, _, _ in taken:
        if begin - start >= size and begin - _align_start(start, size, bank_bytes) >= size:
            break
        if end > start:
            start = end
    return _align_start(start, size, bank_bytes)


def _align_start(start: int, size: int, bank_bytes: int | None) -> int:
    start = -(-start // _ALIGNMENT) * _ALIGNMENT
    if bank_bytes is None:
        return start
    crosses = start // bank_bytes != (start + min(size, bank_bytes) - 1) // bank_bytes
    return -(-start // bank_bytes) * bank_bytes if crosses or size > bank_bytes else start


_MOST_LISTED = 4


def _format_tiles(tiles: Iterable[Tile], label: Callable[[int], str]) -> list[str]:
    """Return texts such as "3 times scores 512 bytes each" for tiles; tiles of equal label and size are one text.

    At most four texts are returned.
    """
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

    Args:
        placement: The placement of all tiles of a core.
        buffer: SBUF or PSUM.
        limit: Usable bytes of a partition.
        chip: Name of the chip.
        label: Function from a tile's serial to the text that names it.
        size: Function from a tile's serial and a number of bytes to the text of that size.

    Raises:
        RuleViolation: The tiles do not fit; the message has the largest tiles and the size that would fit.
    """
    if placement.live_bytes <= limit:
        return
    largest = sorted(placement.peak, key=lambda tile: -tile.bytes)
    taken, before = 0, []
    for first in placement.peak:
        before.append((first.bytes, first.partitions))
        taken = bound_bytes(before)
        if taken > limit:
            break
    siblings = find_siblings(placement.tiles, largest[0])
    fitting = find_largest_fit(placement.tiles, siblings, limit, placement.bank_bytes)
    smaller = "make tiles smaller"
    if fitting > 0:
        now, then = size(largest[0].serial, largest[0].bytes), size(largest[0].serial, fitting)
        smaller = f"{then} per partition in place of {now} fit beside the other tiles"
    raise RuleViolation(
        live_tiles_fit,
        f"{len(placement.peak)} live tiles take {placement.live_bytes} bytes per partition of {buffer.value}, "
        f"{placement.live_bytes - limit} too many; the largest: "
        + "; ".join(_format_tiles(largest, label))
        + f"; the first that does not fit: {label(first.serial)}, by {taken - limit} bytes",
        limit=f"{limit} usable bytes per partition on {chip}",
        hint=f"{smaller}, or end the use of one before the next is filled",
    )

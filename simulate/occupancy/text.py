"""On-chip memory of a launch as text, 80 columns: maps of SBUF and PSUM, loops with their high-water marks, banks."""

from __future__ import annotations

from collections.abc import Sequence

from simulate.occupancy.grid import grid
from simulate.occupancy.marks import letters, place_of, short
from simulate.occupancy.uses import Level, Memory, Occupancy

_WIDTH = 80
_MAP_COLUMNS = 70
_ROWS = 16
_SOURCES = 16
_MISFITS = 4
_PARTITION_ROWS = 8


def text(occupancy: Occupancy, title: str = "") -> str:
    """SBUF and PSUM of one core: what fits and what does not, maps, tiles, loops, banks."""
    where = f"rank {occupancy.rank} core {occupancy.core}, {_n(occupancy.events)} instructions"
    out = [f"{title or occupancy.kernel + ' on ' + occupancy.chip}: {where}"]
    for memory in occupancy.memories:
        out += ["", *_memory(memory, occupancy.events)]
    return "\n".join(line.rstrip() for line in out) + "\n"


def _memory(memory: Memory, events: int) -> list[str]:
    name = memory.region.value.upper()
    if not memory.uses:
        return [f"{name}: not used; {_n(memory.usable_bytes)} bytes per partition are usable"]
    out = [*_summary(memory), ""]
    out += _over_time(memory, events)
    out += ["", *_at_peak(memory)]
    out += ["", *_sources(memory)]
    out += ["", *_levels(memory.levels, memory.usable_bytes)]
    if memory.banks:
        out += ["", *_banks(memory, events)]
    return out


def verdict(memory: Memory) -> str:
    """Whether the tiles fit, in one sentence with the bytes that are left or missing."""
    usable, peak, high = memory.usable_bytes, memory.peak_bytes, memory.high_water_bytes
    if peak > usable:
        return f"does not fit: the live bytes exceed the usable ones by {_n(peak - usable)}"
    if high > usable:
        return f"fits only if packed better than first fit, which ends {_n(high - usable)} bytes beyond the usable ones"
    return f"fits, with {_n(usable - high)} bytes to spare"


def _summary(memory: Memory) -> list[str]:
    usable, peak = memory.usable_bytes, memory.peak_bytes
    out = [
        f"{memory.region.value.upper()}: {verdict(memory)}",
        f"  usable      {_n(usable):>9s} bytes per partition",
        f"  live        {_n(peak):>9s} at most, {_share(peak, usable)}, first at instruction {_n(memory.peak_event)}",
        f"  high water  {_n(memory.high_water_bytes):>9s} where first fit ends, "
        f"{_share(memory.high_water_bytes, usable)}",
    ]
    misfits = {use.source: use for use in reversed(memory.misfits)}  # the first of each source
    for use in sorted(misfits.values(), key=lambda use: use.first_use)[:_MISFITS]:
        source = memory.sources[use.source]
        out += [
            f"  does not fit: {source}, bytes {_n(use.offset)}:{_n(use.end)},",
            f"    {_n(use.end - usable)} too many, from instruction {_n(use.first_use)}, at {place_of(source)}",
        ]
    if len(misfits) > _MISFITS:
        out.append(f"  and tiles of {len(misfits) - _MISFITS} more allocations")
    return out


def _over_time(memory: Memory, events: int) -> list[str]:
    marks = letters(memory)
    top = _top(memory)
    rectangles = [
        (marks[use.source], use.first_use, use.last_use + 1, use.offset, use.end) for use in memory.uses
    ]
    columns = min(_MAP_COLUMNS, max(events, 1))
    rows = _rows(memory, top)
    picture = grid(rectangles, max(events, 1), top, columns, rows)
    out = ["bytes (up) over instructions (across)"]
    for number, row in enumerate(picture):
        out.append(f"{_n(top * (rows - number) // rows):>8s} |{row}")
    return [*out, f"{'0':>8s} +{'-' * columns}", f"{'':10s}0{_n(events - 1):>{max(columns - 1, 1)}s}"]


def _at_peak(memory: Memory) -> list[str]:
    marks = letters(memory)
    live = memory.live_at(memory.peak_event)
    top = _top(memory)
    partitions = memory.partitions
    rows = _PARTITION_ROWS
    rectangles = [
        (
            marks[use.source],
            use.offset,
            use.end,
            partitions - use.first_partition - use.partitions,
            partitions - use.first_partition,
        )
        for use in live
    ]
    picture = grid(rectangles, top, partitions, _MAP_COLUMNS, rows)
    out = [f"partitions (down) by bytes (across) at instruction {_n(memory.peak_event)}"]
    for number, row in enumerate(picture):
        out.append(f"{partitions * number // rows:>8d} |{row}")
    return [*out, f"{'':8s} +{'-' * _MAP_COLUMNS}", f"{'':10s}0{_n(top):>{_MAP_COLUMNS - 1}s}"]


def _sources(memory: Memory) -> list[str]:
    marks = letters(memory)
    order = list(memory.ranks)
    shown = order[:_SOURCES]
    at_peak = set(memory.largest_sources[:4])
    out = [f"  {'tiles':<30s}{'bytes':>8s}{'tiles':>6s}{'live':>5s}  line < callers"]
    for number in shown:
        source = memory.sources[number]
        kind = " @" if source.addressed else ""
        name = _fit(f"{source}{kind}", 30)
        out.append(
            f"{marks[number]} {name:<30s}{_n(source.bytes):>8s}{source.tiles:>6d}{source.most_live:>5d}  "
            f"{_fit(place_of(source), _WIDTH - 53)}"
        )
    if len(order) > len(shown):
        out.append(f"  and {len(order) - len(shown)} smaller ones")
    if any(memory.sources[number].addressed for number in shown):
        out.append("  @ stays at its address=; the others are placed first fit")
    hints = [_hint(memory, number, marks[number]) for number in shown if number in at_peak]
    return [*out, *hints]


def _hint(memory: Memory, number: int, mark: str) -> str:
    source, room = memory.sources[number], memory.room(number)
    name = f"{mark} {_fit(source.name, 16)}"
    if room.elements == 0:
        return f"  no size of {name} fits beside the others"
    return f"  largest free size of {name} that fits beside the others: {_n(room.elements)} {source.dtype}"


def _levels(levels: Sequence[Level], usable: int) -> list[str]:
    out = [f"{'high-water mark by loop':<40s}{'live':>9s}{'share':>9s}{'own':>9s}  line"]
    for level in levels:
        if not level.path:
            name, line = "the whole kernel", ""
        else:
            name = "  " * len(level.path) + level.path[-1].header
            line = short(level.path[-1].where)
        out.append(
            f"{_fit(name, 39):<40s}{_n(level.live_bytes):>9s}{_share(level.live_bytes, usable):>9s}"
            f"{_n(level.own_bytes):>9s}  {_fit(line, 11, keep_end=True)}"
        )
    return out


def _banks(memory: Memory, events: int) -> list[str]:
    assert memory.bank_bytes is not None
    out = [f"{'bank':>4s}{'tiles':>8s}{'high water':>12s} of {_n(memory.bank_bytes)}   held"]
    for bank in memory.banks:
        out.append(
            f"{bank.number:>4d}{bank.tiles:>8d}{_n(bank.high_water_bytes):>12s}"
            f"{'':10s}{_share(bank.events, events):>9s}"
        )
    return out


def _top(memory: Memory) -> int:
    """The byte where maps end: the high-water mark, in PSUM rounded up to a bank."""
    bank = memory.bank_bytes or 1
    return max(-(-memory.high_water_bytes // bank) * bank, 1)


def _rows(memory: Memory, top: int) -> int:
    """Rows of a map: two for each bank that is used, or as many as rows of 4 bytes exist."""
    if memory.bank_bytes is not None:
        return 2 * (top // memory.bank_bytes)
    return max(1, min(_ROWS, top // 4))


def _n(number: int) -> str:
    return f"{number:,}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _fit(line: str, width: int, keep_end: bool = False) -> str:
    if len(line) <= width:
        return line
    return "..." + line[-(width - 3) :] if keep_end else line[: width - 3] + "..."

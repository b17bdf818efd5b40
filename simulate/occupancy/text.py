"""On-chip memory of a launch as text: maps of SBUF and PSUM, loops with their high-water marks, banks.

An allocation is a line of the kernel that makes tiles (`Source`); each has a letter in the maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nkw.report import Drawn, Hanging, Name, Part, table
from nkw.terminal import rendered, report_of
from simulate.occupancy.grid import draw_grid
from simulate.occupancy.marks import assign_letters, format_call_chain, shorten_location
from simulate.occupancy.uses import Level, Memory, Occupancy

_MAP_COLUMNS = 70  # most columns of a map
_SCALE_COLUMNS = 10  # columns of the scale next to a map
_ROWS = 16
_SOURCES = 16
_MISFITS = 4
_PARTITION_ROWS = 8


def text(occupancy: Occupancy, title: str = "") -> str:
    """Return the report on SBUF and PSUM of a core as text: whether tiles fit, maps, allocations, loops, banks.

    Args:
        occupancy: The core.
        title: Begin of the first line; by default the kernel and the chip.
    """
    return rendered(make_report(occupancy, title))


@report_of.register(Occupancy)
def make_report(occupancy: Occupancy, title: str = "") -> list[Part]:
    """Return the report of `text` as parts that a terminal lays out."""
    position = f"rank {occupancy.rank} core {occupancy.core}, {_n(occupancy.events)} instructions"
    head = f"{title or occupancy.kernel + ' on ' + occupancy.chip}: {position}"
    out: list[Part] = [Hanging(head, style="bold")]
    for memory in occupancy.memories:
        out += ["", *_make_section(memory, occupancy.events)]
    return out


def _make_section(memory: Memory, events: int) -> list[Part]:
    """Return the section on SBUF or PSUM, a single line if it is not used; `events` is the number of instructions."""
    name = memory.region.value.upper()
    if not memory.uses:
        return [f"{name}: not used; {_n(memory.usable_bytes)} bytes per partition are usable"]
    out = [
        *_make_summary(memory),
        "",
        Drawn(partial(_draw_over_time, memory, events)),
        "",
        Drawn(partial(_draw_at_peak, memory)),
    ]
    out += ["", *_make_source_table(memory), "", _make_level_table(memory.levels, memory.usable_bytes)]
    return [*out, "", _make_bank_table(memory, events)] if memory.banks else out


def verdict(memory: Memory) -> str:
    """Return whether the tiles of SBUF or PSUM fit, as a sentence with the remaining or missing bytes per partition."""
    usable, peak, high = memory.usable_bytes, memory.peak_bytes, memory.high_water_bytes
    if peak > usable:
        return f"does not fit: the live bytes exceed the usable ones by {_n(peak - usable)}"
    if high > usable:
        return f"fits only if packed better than first fit, which ends {_n(high - usable)} bytes beyond the usable ones"
    return f"fits, with {_n(usable - high)} bytes to spare"


def _make_summary(memory: Memory) -> list[Part]:
    """Return the verdict, usable, live and high-water bytes of a memory, and lines about tiles that do not fit.

    The first tile of each of at most four allocations is named.
    """
    usable, peak, high = memory.usable_bytes, memory.peak_bytes, memory.high_water_bytes
    rows = [
        ("usable", _n(usable), "bytes per partition"),
        ("live", _n(peak), f"at most, {_share(peak, usable)}, first at instruction {_n(memory.peak_event)}"),
        ("high water", _n(high), f"where first fit ends, {_share(high, usable)}"),
    ]
    out: list[Part] = [Hanging(f"{memory.region.value.upper()}: {verdict(memory)}", style="bold")]
    out.append(table("", rows, left=(0, 2), indent=2, gap=1))
    misfits = {use.source: use for use in reversed(memory.misfits)}  # first tile of each source
    for use in sorted(misfits.values(), key=lambda use: use.first_use)[:_MISFITS]:
        source = memory.sources[use.source]
        out += [
            Hanging(
                f"  does not fit: {source}, bytes {_n(use.offset)}:{_n(use.end)}, {_n(use.end - usable)} too many, "
                f"from instruction {_n(use.first_use)}, at {format_call_chain(source)}",
                4,
            )
        ]
    if len(misfits) > _MISFITS:
        out.append(f"  and tiles of {len(misfits) - _MISFITS} more allocations")
    return out


def _draw_over_time(memory: Memory, events: int, width: int) -> list[str]:
    """Return the map of bytes (up) over instructions (across), drawn with at most `width` columns.

    Args:
        memory: The memory.
        events: The number of instructions.
        width: The columns of the terminal.
    """
    marks = assign_letters(memory)
    top = _find_top(memory)
    rectangles = [
        (marks[use.source], use.first_use, use.last_use + 1, use.offset, use.end) for use in memory.uses
    ]
    columns = min(_MAP_COLUMNS, width - _SCALE_COLUMNS, max(events, 1))
    rows = _count_rows(memory, top)
    picture = draw_grid(rectangles, max(events, 1), top, columns, rows)
    out = ["bytes (up) over instructions (across)"]
    for number, row in enumerate(picture):
        out.append(f"{_n(top * (rows - number) // rows):>8s} |{row}")
    return [*out, f"{'0':>8s} +{'-' * columns}", f"{'':10s}0{_n(events - 1):>{max(columns - 1, 1)}s}"]


def _draw_at_peak(memory: Memory, width: int) -> list[str]:
    """Return the map of partitions (down) by bytes (across) at the first instruction with the most live bytes.

    It is drawn with at most `width` columns.
    """
    columns = min(_MAP_COLUMNS, width - _SCALE_COLUMNS)
    marks = assign_letters(memory)
    live = memory.live_at(memory.peak_event)
    top = _find_top(memory)
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
    picture = draw_grid(rectangles, top, partitions, columns, rows)
    out = [f"partitions (down) by bytes (across) at instruction {_n(memory.peak_event)}"]
    for number, row in enumerate(picture):
        out.append(f"{partitions * number // rows:>8d} |{row}")
    return [*out, f"{'':8s} +{'-' * columns}", f"{'':10s}0{_n(top):>{columns - 1}s}"]


def _make_source_table(memory: Memory) -> list[Part]:
    """Return the table of the first 16 allocations in the order of `Memory.ranks`, and hints about the largest four."""
    marks = assign_letters(memory)
    order = list(memory.ranks)
    listed = order[:_SOURCES]
    at_peak = set(memory.largest_sources[:4])
    rows = []
    for number in listed:
        source = memory.sources[number]
        name = f"{marks[number]} {source}{' @' if source.addressed else ''}"
        rows.append(
            (name, _n(source.bytes), str(source.tiles), str(source.most_live), format_call_chain(source))
        )
    out: list[Part] = [table("  tiles|bytes|tiles|live|line < callers", rows, left=(0, 4), firm=(0,))]
    if len(order) > len(listed):
        out.append(f"  and {len(order) - len(listed)} smaller ones")
    if any(memory.sources[number].addressed for number in listed):
        out.append("  @ stays at its address=; the others are placed first fit")
    return [*out, *(_make_hint(memory, number, marks[number]) for number in listed if number in at_peak)]


def _make_hint(memory: Memory, number: int, mark: str) -> Hanging:
    """Return a line about how many elements of the free dimension an allocation's tiles could have beside the others.

    Args:
        memory: The memory.
        number: The index of the allocation in `Memory.sources`.
        mark: Its letter.
    """
    source, elements = memory.sources[number], memory.largest_free_size(number)
    name = f"{mark} {source.name}"
    if elements == 0:
        return Hanging(f"  no size of {name} fits beside the others", 4)
    return Hanging(
        f"  largest free size of {name} that fits beside the others: {_n(elements)} {source.dtype}", 4
    )


def _make_level_table(levels: Sequence[Level], usable: int) -> Part:
    """Return the table of loops, indented by depth, with the most live bytes inside and their share of `usable`."""
    rows = []
    for level in levels:
        name = "  " * len(level.path) + level.path[-1].header if level.path else "the whole kernel"
        numbers = _n(level.live_bytes), _share(level.live_bytes, usable), _n(level.inner_bytes)
        rows.append((name, *numbers, Name(shorten_location(level.path[-1].where)) if level.path else ""))
    return table("high-water mark by loop|live|share|own|line", rows, left=(0, 4))


def _make_bank_table(memory: Memory, events: int) -> Part:
    """Return the table of PSUM banks: tiles, high-water mark, and share of the instructions with a live tile."""
    assert memory.bank_bytes is not None
    rows = [
        (str(bank.number), str(bank.tiles), _n(bank.high_water_bytes), _share(bank.events, events))
        for bank in memory.banks
    ]
    return table(f"bank|tiles|high water of {_n(memory.bank_bytes)}|held", rows, left=())


def _find_top(memory: Memory) -> int:
    """Return the byte at which maps end: the high-water mark, in PSUM rounded up to a bank."""
    bank = memory.bank_bytes or 1
    return max(-(-memory.high_water_bytes // bank) * bank, 1)


def _count_rows(memory: Memory, top: int) -> int:
    """Return the number of rows of a map that ends at byte `top`.

    PSUM has two rows for each used bank; SBUF has 16, or fewer so that a row has at least 4 bytes.
    """
    if memory.bank_bytes is not None:
        return 2 * (top // memory.bank_bytes)
    return max(1, min(_ROWS, top // 4))


def _n(number: int) -> str:
    """Format a number with thousands separators."""
    return f"{number:,}"


def _share(amount: int, total: int) -> str:
    """Format an amount as a percentage of a total; "-" if the total is 0."""
    return f"{100 * amount / total:.1f} %" if total else "-"

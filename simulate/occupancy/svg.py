"""On-chip memory of a launch as a self-contained SVG, with light and dark colours, and tooltips in <title>."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby, pairwise

import numpy as np

from nkw.report import as_html
from nkw.terminal import html_of
from simulate.occupancy.lanes import choose_lanes
from simulate.occupancy.loops import Loop
from simulate.occupancy.marks import assign_letters, format_call_chain
from simulate.occupancy.plot import Plot, format_box, make_line, make_text
from simulate.occupancy.style import COLOURS, STYLE
from simulate.occupancy.text import make_report, verdict
from simulate.occupancy.uses import Memory, Occupancy, Use

_WIDTH = 1160
_LEFT, _PLOT, _GAP, _PEAK = 88, 700, 40, 300
_HEIGHT = {"sbuf": 300, "psum": 240}
_LANE = 120  # least height in pixels of a map of some partitions
_LOOP_ROW = 12
_LEGEND_ROW = 18
_LEGEND_ROWS = 20
_THINNEST = 0.6  # least width in pixels; narrower rectangles of an allocation that touch are merged


def svg(occupancies: Sequence[tuple[str, Occupancy]]) -> str:
    """Draw the memory maps of cores, given as (title, occupancy), one below another; return an SVG document.

    Equal arguments give equal text.
    """
    elements: list[str] = []
    top = 16
    for title, occupancy in occupancies:
        core_elements, height = _draw_core(title, occupancy, top)
        elements += core_elements
        top += height
    size = f'width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="nkw-memory map" {size} role="img">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" width="{_WIDTH}" height="{top}"/>\n' + "\n".join(elements) + "\n</svg>\n"
    )


@html_of.register(Occupancy)
def _make_html(occupancy: Occupancy) -> str:
    """Return the memory maps of a core as HTML for a notebook, with the report as text folded below."""
    words = f"<details><summary>as text</summary>{as_html(make_report(occupancy))}</details>"
    picture = svg([(f"{occupancy.kernel} on {occupancy.chip}", occupancy)])
    return f'<div style="overflow-x: auto">{picture}</div>{words}'


def _draw_core(title: str, occupancy: Occupancy, top: int) -> tuple[list[str], int]:
    """Return the SVG elements of a core below `top` pixels, and their height in pixels."""
    out = [make_text(20, top + 14, title, "title")]
    words = f"rank {occupancy.rank} core {occupancy.core}, {occupancy.events:,} instructions; time is program order"
    out.append(make_text(20, top + 34, words, "note"))
    height = 60
    for memory in occupancy.memories:
        elements, memory_height = _draw_memory(memory, occupancy, top + height)
        out += elements
        height += memory_height
    return out, height + 12


def _draw_memory(memory: Memory, occupancy: Occupancy, top: int) -> tuple[list[str], int]:
    """Return the SVG elements of SBUF or PSUM below `top` pixels, and their height in pixels.

    These are the map of bytes over instructions with the loops below, the map of partitions, and the legend. A memory
    that is not used has a title alone.
    """
    name = memory.region.value
    summary = f"{name.upper()}: {verdict(memory) if memory.uses else 'not used'}"
    out = [make_text(20, top, summary, "head")]
    if not memory.uses:
        return out, 32
    lanes = choose_lanes(memory)
    height = max(_HEIGHT[name], len(lanes) * _LANE)
    plot = Plot(_LEFT, top + 24, _PLOT, height, max(occupancy.events, 1), _find_scale_end(memory))
    for number, lane in enumerate(lanes):
        subplot = plot.subplot(number, len(lanes))
        out += _draw_bytes_axis(memory, subplot)
        out += _draw_tiles(memory, subplot, lane)
        out += _draw_live_curve(memory, subplot)
        out += _draw_limit(memory, subplot)
        if len(lanes) > 1:
            words = f"partitions {lane.start} to {lane.stop - 1}"
            out.append(make_text(subplot.left + subplot.width - 4, subplot.top + 12, words, "axis end ink"))
    out.append(make_text(_LEFT, plot.bottom + 14, "instruction 0", "axis"))
    out.append(make_text(_LEFT + _PLOT, plot.bottom + 14, f"{occupancy.events - 1:,}", "axis end"))
    loops, loop_height = _draw_loops(occupancy, plot.bottom + 22, plot)
    out += loops
    out += _draw_at_peak(memory, plot)
    legend, legend_height = _draw_legend(memory, plot.bottom + 34 + loop_height)
    return out + legend, 24 + height + 34 + loop_height + legend_height + 24


def _find_scale_end(memory: Memory) -> int:
    """Return the byte at the upper edge of a map.

    This is the high-water mark, or the usable bytes if they are more. If tiles use less than a third of SBUF, it is the
    high-water mark, rounded up.
    """
    high, usable = memory.high_water_bytes, memory.usable_bytes
    if memory.bank_bytes is not None or 3 * high >= usable:
        return max(high, usable)
    step = 1 << max(int(high).bit_length() - 3, 2)
    return -(-high // step) * step


def _draw_bytes_axis(memory: Memory, plot: Plot) -> list[str]:
    """Return the background, grid lines and labels of the axis of bytes: the banks of PSUM, or quarters of SBUF."""
    out = [f'<rect class="field" {format_box(plot.left, plot.top, plot.width, plot.height)}/>']
    size = memory.bank_bytes
    if size is not None:
        starts = range(0, plot.end_byte, size)
        marks = [(byte, byte + size / 2, f"bank {number}") for number, byte in enumerate(starts)]
    else:
        marks = [(byte, byte, f"{byte:,}") for byte in (plot.end_byte * quarter // 4 for quarter in range(5))]
    for byte, label_byte, label in marks:
        y = plot.y(byte)
        out.append(make_line(plot.left, y, plot.left + plot.width, y, "grid"))
        out.append(make_text(plot.left - 8, plot.y(label_byte) + 4, label, "axis end"))
    return out


def _draw_limit(memory: Memory, plot: Plot) -> list[str]:
    """Return the line at the end of the usable bytes with its label; nothing above the plot, or on its edge in PSUM."""
    if plot.end_byte < memory.usable_bytes or (memory.bank_bytes and plot.end_byte == memory.usable_bytes):
        return []
    y = plot.y(memory.usable_bytes)
    return [
        make_line(plot.left, y, plot.left + plot.width, y, "limit"),
        make_text(plot.left + plot.width - 4, y - 4, f"usable {memory.usable_bytes:,}", "axis end ink"),
    ]


def _draw_tiles(memory: Memory, plot: Plot, lane: range) -> list[str]:
    """Return the rectangles of the tiles that have a partition in the range `lane`."""
    marks = assign_letters(memory)
    out = []
    for use, first, last, count in _merge_narrow_tiles(memory, plot.events / plot.width * _THINNEST):
        if use.first_partition >= lane.stop or use.first_partition + use.partitions <= lane.start:
            continue
        x, y = plot.x(first), plot.y(use.end)
        width, height = plot.x(last + 1) - x, plot.y(use.offset) - y
        title = _make_tooltip(memory, use, first, last, count, marks[use.source])
        out += _draw_tile(_get_colour(memory, use.source), x, y, width, height, title, marks[use.source])
    return out


def _draw_tile(
    fill: str, x: float, y: float, width: float, height: float, title: str, mark: str
) -> list[str]:
    """Return the rectangle of a tile with a tooltip, and its letter if it is large enough.

    Args:
        fill: Its colour.
        x: Left edge in pixels.
        y: Upper edge in pixels.
        width: Width in pixels.
        height: Height in pixels.
        title: The tooltip, already escaped.
        mark: The letter of its allocation.
    """
    out = [
        f'<rect class="tile" fill="{fill}" {format_box(x, y, width, height)}><title>{title}</title></rect>'
    ]
    if width > 14 and height > 12:
        out.append(make_text(x + width / 2, y + height / 2 + 4, mark, "mark"))
    return out


def _merge_narrow_tiles(memory: Memory, gap: float) -> list[tuple[Use, int, int, int]]:
    """Merge tiles that would be drawn narrower than a visible rectangle and follow each other.

    Tiles merge if they have the same allocation, first byte and first partition, if each is live for fewer than `gap`
    instructions, and if they follow each other within `gap` instructions.

    Returns:
        (first tile, first use, last use, number of merged tiles), by the first tile's position in `Memory.uses`.
    """
    runs: list[tuple[Use, int, int, int]] = []
    last_index: dict[tuple[int, int, int], int] = {}
    for use in memory.uses:
        key = (use.source, use.offset, use.first_partition)
        index = last_index.get(key)
        if index is not None:
            first_use_of_run, first, last, count = runs[index]
            narrow = use.last_use - use.first_use < gap and (last - first) / count < gap + 1
            if narrow and use.first_use - last <= gap:
                runs[index] = (first_use_of_run, first, max(last, use.last_use), count + 1)
                continue
        last_index[key] = len(runs)
        runs.append((use, use.first_use, use.last_use, 1))
    return runs


def _make_tooltip(memory: Memory, use: Use, first: int, last: int, count: int, mark: str) -> str:
    """Return the tooltip of a tile, or of `count` merged tiles, escaped for XML.

    Args:
        memory: The memory.
        use: The tile, or the first of the merged tiles.
        first: First instruction that uses it.
        last: Last instruction that uses it.
        count: Number of merged tiles.
        mark: Letter of its allocation.
    """
    source = memory.sources[use.source]
    bank = ""
    if memory.bank_bytes is not None:
        banks = use.offset // memory.bank_bytes, (use.end - 1) // memory.bank_bytes
        bank = f", bank {banks[0]}" if banks[0] == banks[1] else f", banks {banks[0]} to {banks[1]}"
    lines = [
        f"{mark} {source}" + (f", {count} tiles one after another" if count > 1 else ""),
        f"bytes {use.offset:,}:{use.end:,}{bank}"
        f", partitions {use.first_partition}:{use.first_partition + use.partitions}",
        f"instructions {first:,} to {last:,}",
        format_call_chain(source),
        "at its address=" if source.addressed else "placed first fit",
    ]
    lines += [f"in {loop.header}" for loop in source.loops]
    return escape("\n".join(lines), quote=False)


def _draw_live_curve(memory: Memory, plot: Plot) -> list[str]:
    """Return the curve of live bytes over instructions, as the maximum at each pixel, and the high-water line."""
    live = memory.live_bytes
    pixels = min(int(plot.width), len(live))
    edges = np.linspace(0, len(live), pixels + 1).astype(int)
    points = []
    for start, end in pairwise(edges):
        y = plot.y(int(live[start : max(end, start + 1)].max()))
        points += [f"{plot.x(start):.1f},{y:.1f}", f"{plot.x(end):.1f},{y:.1f}"]
    peak = f"live bytes: at most {memory.peak_bytes:,}, first at instruction {memory.peak_event:,}"
    high = plot.y(memory.high_water_bytes)
    return [
        f'<polyline class="live" points="{" ".join(points)}"><title>{peak}</title></polyline>',
        make_line(plot.left, high, plot.left + plot.width, high, "high"),
        make_text(plot.left + 4, high - 4, f"high water {memory.high_water_bytes:,}", "axis"),
    ]


def _draw_loops(occupancy: Occupancy, top: float, plot: Plot) -> tuple[list[str], int]:
    """Return the bars of loops over the instructions inside them, a row for each depth, and their height in pixels.

    Args:
        occupancy: The core.
        top: Upper edge of the bars in pixels.
        plot: The map whose axis of instructions they share.
    """
    deepest = max((len(path) for path, _, _ in occupancy.nest), default=0)
    out = []
    narrow = plot.events / plot.width * _THINNEST
    for depth in range(deepest):
        y = top + depth * _LOOP_ROW
        for index, (loop, start, end) in enumerate(_find_open_loops(occupancy, depth, narrow)):
            rectangle = format_box(plot.x(start), y, plot.x(end) - plot.x(start), _LOOP_ROW - 2)
            title = escape(
                f"{loop.header}\nat {loop.where}\ninstructions {start:,} to {end - 1:,}", quote=False
            )
            out.append(f'<rect class="loop{" odd" * (index % 2)}" {rectangle}><title>{title}</title></rect>')
    if deepest:
        out.append(make_text(plot.left - 8, top + 9, "loops", "axis end"))
    return out, deepest * _LOOP_ROW + (8 if deepest else 0)


def _find_open_loops(occupancy: Occupancy, depth: int, gap: float) -> list[tuple[Loop, int, int]]:
    """Return the runs of loops at a depth of nesting, 0 for outermost: (loop, first instruction, end instruction).

    Runs of the same loop merge if they are shorter than `gap` instructions and less than `gap` apart.
    """
    open_loops: list[tuple[Loop, int, int]] = []
    for path, runs in groupby(occupancy.nest, key=lambda run: run[0][: depth + 1]):
        inner_runs = list(runs)
        if len(path) <= depth:
            continue
        loop, start, end = path[depth], inner_runs[0][1], inner_runs[-1][2]
        if open_loops and open_loops[-1][0] == loop and start - open_loops[-1][2] < gap and end - start < gap:
            open_loops[-1] = (loop, open_loops[-1][1], end)
        else:
            open_loops.append((loop, start, end))
    return open_loops


def _draw_at_peak(memory: Memory, plot: Plot) -> list[str]:
    """Return the map of partitions (down) by bytes (across) at the first instruction with the most live bytes.

    It is drawn to the right of `plot`, with its height.
    """
    left = plot.left + plot.width + _GAP
    live = memory.live_at(memory.peak_event)
    partitions = memory.partitions
    end = max([plot.end_byte, *(use.end for use in live)])
    marks = assign_letters(memory)
    out = [
        make_text(left, plot.top - 8, f"partitions by bytes at instruction {memory.peak_event:,}", "axis"),
        f'<rect class="field" {format_box(left, plot.top, _PEAK, plot.height)}/>',
    ]
    if memory.bank_bytes is not None:
        for byte in range(memory.bank_bytes, end, memory.bank_bytes):
            x = left + _PEAK * byte / end
            out.append(make_line(x, plot.top, x, plot.bottom, "grid"))
    for use in live:
        x, width = left + _PEAK * use.offset / end, _PEAK * use.bytes / end
        y = plot.top + plot.height * use.first_partition / partitions
        height = plot.height * use.partitions / partitions
        title = _make_tooltip(memory, use, use.first_use, use.last_use, 1, marks[use.source])
        out += _draw_tile(_get_colour(memory, use.source), x, y, width, height, title, marks[use.source])
    out += [
        make_text(left, plot.bottom + 14, "byte 0", "axis"),
        make_text(left + _PEAK, plot.bottom + 14, f"{end:,}", "axis end"),
        make_text(left - 6, plot.top + 10, "0", "axis end"),
        make_text(left - 6, plot.bottom, f"{partitions - 1}", "axis end"),
    ]
    return out


def _draw_legend(memory: Memory, top: float) -> tuple[list[str], int]:
    """Return the table of the first 20 allocations in the order of `Memory.ranks`, and its height in pixels."""
    marks = assign_letters(memory)
    order = list(memory.ranks)
    listed = order[:_LEGEND_ROWS]
    at_peak = set(memory.largest_sources[:4])
    columns = [(_LEFT + 24, ""), (430, "end"), (490, "end"), (540, "end"), (560, ""), (860, "")]
    heads = (
        "tiles",
        "bytes",
        "tiles",
        "live",
        "line < callers",
        "largest free size that fits beside the others",
    )
    out = [make_text(x, top + 10, head, f"axis {anchor}") for (x, anchor), head in zip(columns, heads)]
    for row, source_index in enumerate(listed):
        source = memory.sources[source_index]
        y = top + 10 + (row + 1) * _LEGEND_ROW
        hint = ""
        if source_index in at_peak:
            elements = memory.largest_free_size(source_index)
            hint = f"{elements:,} {source.dtype}" if elements else "nothing"
        cells = (
            f"{source}" + (" @ address" if source.addressed else ""),
            f"{source.bytes:,}",
            f"{source.tiles}",
            f"{source.most_live}",
            _shorten(format_call_chain(source), 46),
            hint,
        )
        out.append(
            f'<rect class="tile" fill="{_get_colour(memory, source_index)}" {format_box(_LEFT, y - 11, 14, 14)}/>'
        )
        out.append(make_text(_LEFT + 7, y, marks[source_index], "mark"))
        out += [make_text(x, y, cell, f"row {anchor}") for (x, anchor), cell in zip(columns, cells) if cell]
    height = (len(listed) + 1) * _LEGEND_ROW
    if len(order) > len(listed):
        out.append(
            make_text(_LEFT + 24, top + 10 + height, f"and {len(order) - len(listed)} smaller ones", "axis")
        )
        height += _LEGEND_ROW
    return out, height


def _get_colour(memory: Memory, source: int) -> str:
    """Return the colour of an allocation, given by its index; the twelve colours repeat in the order of ranks."""
    return COLOURS[memory.ranks[source] % len(COLOURS)]


def _shorten(line: str, width: int) -> str:
    """Shorten a text to `width` characters, the last three of which are dots then."""
    return line if len(line) <= width else line[: width - 3] + "..."

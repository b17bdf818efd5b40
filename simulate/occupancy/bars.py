"""Bar charts, a bar for each size of a sweep, as characters and as SVG.

`simulate.occupancy.sweep` and `simulate.profile.sweep` make the charts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulate.occupancy.plot import format_box, make_line, make_text
from simulate.occupancy.style import COLOURS, STYLE

_COLUMNS = 46  # columns of the longest bar
_LEAST_COLUMNS = 8
_MARKS = "#-"
_WIDTH, _LEFT, _PLOT, _ROW, _HEAD = 900, 90, 560, 22, 60  # pixels


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its label, the lengths of its segments from left to right, and the note after it."""

    label: str
    segments: tuple[float, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Chart of bars with a common scale from 0.

    `names` are the names of the segments, the same for all bars. `limit` is a length that bars should not exceed, or
    None; it is drawn as a line.
    """

    title: str
    names: tuple[str, ...]
    bars: tuple[Bar, ...]
    limit: float | None = None

    @property
    def end(self) -> float:
        """Length that fills the width of the chart: of the longest bar or the limit; 1.0 if all lengths are 0."""
        return max([sum(bar.segments) for bar in self.bars] + [self.limit or 0.0]) or 1.0


def draw_bars(chart: Bars, columns: int) -> list[str]:
    """Draw a chart as lines of text: a title with the legend, then a line for each bar.

    The limit is drawn as |. A bar continues beyond it only if the bar is longer than the limit.

    Args:
        chart: The chart; only the first two segments of its bars are drawn.
        columns: The width for label, bar and note. Lines are wider if that leaves a bar fewer than 8 columns.
    """
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(_MARKS, chart.names))
    chart_lines = [
        f"{chart.title}: {legend}" + ("" if chart.limit is None else f", | limit {chart.limit:,.0f}")
    ]
    width, notes = (
        max((len(text) for text in texts), default=0)
        for texts in ([bar.label for bar in chart.bars], [bar.note for bar in chart.bars])
    )
    limits = chart.limit is not None
    bar_columns = min(_COLUMNS, max(columns - width - notes - 2 - limits, _LEAST_COLUMNS))
    for bar in chart.bars:
        bar_text, segments_end = "", 0.0
        for mark, segment in zip(_MARKS, bar.segments):
            segments_end += segment
            bar_text += mark * (_count_columns(segments_end, chart.end, bar_columns) - len(bar_text))
        if chart.limit is not None:
            limit_column = _count_columns(chart.limit, chart.end, bar_columns)
            bar_text = f"{bar_text[:limit_column]:<{limit_column}}|{bar_text[limit_column:]}"
        chart_lines.append(f"{bar.label:>{width}} {bar_text:<{bar_columns + limits}} {bar.note}".rstrip())
    return chart_lines


def _count_columns(length: float, end: float, columns: int) -> int:
    """Return the number of columns that a length takes if `end` takes `columns`; at least 1 for a positive length."""
    return max(round(columns * length / end), length > 0)


def draw_bars_svg(charts: Sequence[Bars]) -> str:
    """Draw charts one below another; return a self-contained SVG document. Equal charts give equal text."""
    elements: list[str] = []
    top = 16
    for chart in charts:
        elements += _draw_chart(chart, top)
        top += _HEAD + _ROW * len(chart.bars) + 20
    size = f'width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="nkw-memory" {size} role="img">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" width="{_WIDTH}" height="{top}"/>\n' + "\n".join(elements) + "\n</svg>\n"
    )


def _draw_chart(chart: Bars, top: int) -> list[str]:
    """Return the SVG elements of a chart, whose upper edge is at `top` pixels: title, legend, bars and limit."""
    elements = [make_text(20, top + 14, chart.title, "title")]
    legend_x = _LEFT
    for name, colour in zip(chart.names, COLOURS):
        elements.append(f'<rect fill="{colour}" {format_box(legend_x, top + 30, 10, 10)}/>')
        elements.append(make_text(legend_x + 16, top + 39, name, "note"))
        legend_x += 40 + 8 * len(name)
    first = top + _HEAD - 8
    for row, bar in enumerate(chart.bars):
        y, x = first + row * _ROW, float(_LEFT)
        elements.append(make_text(_LEFT - 8, y + 14, bar.label, "axis end"))
        for segment, colour in zip(bar.segments, COLOURS):
            length = _PLOT * segment / chart.end
            if length:
                elements.append(f'<rect fill="{colour}" {format_box(x, y + 3, length, _ROW - 6)}/>')
            x += length
        elements.append(make_text(_LEFT + _PLOT + 12, y + 14, bar.note, "axis ink"))
    if chart.limit is not None:
        x = _LEFT + _PLOT * chart.limit / chart.end
        elements.append(make_line(x, first, x, first + _ROW * len(chart.bars), "limit"))
        elements.append(make_text(x, first - 4, f"limit {chart.limit:,.0f}", "axis end ink"))
    return elements

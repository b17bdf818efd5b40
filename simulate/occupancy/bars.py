"""Bars beside each other, one per size of a sweep, as characters and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulate.occupancy.plot import box, line, text
from simulate.occupancy.style import COLOURS, STYLE

_COLUMNS = 46  # of the longest bar
_LEAST_COLUMNS = 8
_MARKS = "#-"
_WIDTH, _LEFT, _PLOT, _ROW, _HEAD = 900, 90, 560, 22, 60  # pixels


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its label, the lengths of its parts from left to right, and words behind it."""

    label: str
    parts: tuple[float, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on one scale from 0; `names` are those of the parts. `limit` is a length that no bar should pass."""

    title: str
    names: tuple[str, ...]
    bars: tuple[Bar, ...]
    limit: float | None = None

    @property
    def end(self) -> float:
        """The length that fills the picture."""
        return max([sum(bar.parts) for bar in self.bars] + [self.limit or 0.0]) or 1.0


def drawn(chart: Bars, columns: int) -> list[str]:
    """Lines of so many characters; a bar passes the limit, which is drawn as |, only where it is longer."""
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(_MARKS, chart.names))
    out = [f"{chart.title}: {legend}" + ("" if chart.limit is None else f", | limit {chart.limit:,.0f}")]
    width, notes = (
        max((len(words) for words in each), default=0)
        for each in ([bar.label for bar in chart.bars], [bar.note for bar in chart.bars])
    )
    limits = chart.limit is not None
    most = min(_COLUMNS, max(columns - width - notes - 2 - limits, _LEAST_COLUMNS))
    for bar in chart.bars:
        cells, done = "", 0.0
        for mark, part in zip(_MARKS, bar.parts):
            done += part
            cells += mark * (_cells(done, chart.end, most) - len(cells))
        if chart.limit is not None:
            at = _cells(chart.limit, chart.end, most)
            cells = f"{cells[:at]:<{at}}|{cells[at:]}"
        out.append(f"{bar.label:>{width}} {cells:<{most + limits}} {bar.note}".rstrip())
    return out


def _cells(length: float, end: float, most: int) -> int:
    """Columns of a length, `most` for `end`: at least one for more than nothing."""
    return max(round(most * length / end), length > 0)


def svg(charts: Sequence[Bars]) -> str:
    """The charts below each other as one self-contained picture; the same bytes in every run."""
    parts: list[str] = []
    top = 16
    for chart in charts:
        parts += _chart(chart, top)
        top += _HEAD + _ROW * len(chart.bars) + 20
    size = f'width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="nkw-memory" {size} role="img">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" width="{_WIDTH}" height="{top}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _chart(chart: Bars, top: int) -> list[str]:
    out = [text(20, top + 14, chart.title, "title")]
    at = _LEFT
    for name, colour in zip(chart.names, COLOURS):
        out.append(f'<rect fill="{colour}" {box(at, top + 30, 10, 10)}/>')
        out.append(text(at + 16, top + 39, name, "note"))
        at += 40 + 8 * len(name)
    first = top + _HEAD - 8
    for number, bar in enumerate(chart.bars):
        y, x = first + number * _ROW, float(_LEFT)
        out.append(text(_LEFT - 8, y + 14, bar.label, "axis end"))
        for part, colour in zip(bar.parts, COLOURS):
            length = _PLOT * part / chart.end
            if length:
                out.append(f'<rect fill="{colour}" {box(x, y + 3, length, _ROW - 6)}/>')
            x += length
        out.append(text(_LEFT + _PLOT + 12, y + 14, bar.note, "axis ink"))
    if chart.limit is not None:
        x = _LEFT + _PLOT * chart.limit / chart.end
        out.append(line(x, first, x, first + _ROW * len(chart.bars), "limit"))
        out.append(text(x, first - 4, f"limit {chart.limit:,.0f}", "axis end ink"))
    return out

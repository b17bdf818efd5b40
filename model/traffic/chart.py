"""Charts of the traffic page as inline SVG, without scripts: lines over linear or logarithmic axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 20, 36
_COLOURS = ("#5b8db8", "#d59a4c", "#6aa574", "#b0739b", "#c77f6d")  # of the project's other pages
_MOST_TICKS = 7

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Line of a chart through points (x, y); `name` is its text in the key, and with `dots` every point is marked."""

    name: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class Scale:
    """Axis of a chart from `low` to `high`; `label` names its quantity or unit."""

    label: str
    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def around(cls, label: str, numbers: Iterable[float], logarithmic: bool = False) -> Scale:
        """Return the smallest axis that covers numbers, from 0 on; a logarithmic one covers those above 0.

        Without such numbers a linear axis ends at 1, and a logarithmic one goes from 1 to 10.
        """
        numbers = list(numbers)
        if not logarithmic:
            return cls(label, 0.0, max(numbers, default=0.0) or 1.0)
        positive = [number for number in numbers if number > 0] or [1.0]
        low, high = min(positive), max(positive)
        return cls(label, low, high if high > low else 10 * low, True)

    def locate(self, number: float) -> float:
        """Return the position of a number along the axis: 0 at `low` and 1 at `high`.

        Numbers below a logarithmic axis have the position 0; other numbers off the axis are below 0 or above 1.
        """
        if self.logarithmic:
            number = max(number, self.low)
            return (log10(number) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (number - self.low) / (self.high - self.low)

    def list_ticks(self) -> list[float]:
        """Return up to a dozen round numbers within the axis, in ascending order."""
        if self.logarithmic:
            first, last = floor(log10(self.low)), ceil(log10(self.high))
            steps = (1, 2, 5) if last - first <= 2 else (1,)
            stride = max(1, -(-(last - first) // _MOST_TICKS))
            ticks = [step * 10.0**power for power in range(first, last + 1, stride) for step in steps]
            return [tick for tick in ticks if self.low <= tick <= self.high]
        power = 10.0 ** floor(log10((self.high - self.low) / 4))
        multiples = (factor * power for factor in (1, 2, 5, 10))
        step = next(step for step in multiples if (self.high - self.low) / step < _MOST_TICKS)
        return [index * step for index in range(ceil(self.low / step), floor(self.high / step) + 1)]


def render_chart(
    title: str, x: Scale, y: Scale, lines: Sequence[Line], mark: tuple[str, float] | None = None
) -> str:
    """Return a chart as HTML: a heading, a key and an SVG image.

    Args:
        title: The heading.
        x: The horizontal axis.
        y: The vertical axis.
        lines: The lines; those without points have an entry in the key only.
        mark: Label and x of a vertical line; it is left out if x is off the axis.
    """
    colours = [_COLOURS[index % len(_COLOURS)] for index in range(len(lines))]
    key = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(line.name)}</span>'
        for line, colour in zip(lines, colours)
    )
    elements = [*_draw_axes(x, y)]
    if mark is not None and x.low <= mark[1] <= x.high:
        column = _locate_column(x, mark[1])
        elements += [
            f'<path d="M{column} {_TOP} V{_HEIGHT - _BOTTOM}" stroke="var(--hot)" stroke-dasharray="4 3"/>',
            _draw_text(column - 4, _HEIGHT - _BOTTOM - 8, mark[0], "end"),
        ]
    for line, colour in zip(lines, colours):
        pixels = [(_locate_column(x, point[0]), _locate_row(y, point[1])) for point in line.points]
        elements += _draw_line(line, pixels, colour) if pixels else ()
    return (
        f'<h3>{escape(title)}</h3>\n<p>{key}</p>\n<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" '
        f'aria-label="{escape(title)}">\n' + "\n".join(elements) + "\n</svg>"
    )


def _locate_column(x: Scale, number: float) -> float:
    """Return the horizontal position of a number on the x axis, in pixels."""
    return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * x.locate(number), 1)


def _locate_row(y: Scale, number: float) -> float:
    """Return the vertical position of a number on the y axis, in pixels from the top."""
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * y.locate(number), 1)


def _draw_axes(x: Scale, y: Scale) -> Iterable[str]:
    """Yield SVG elements: a grid line and a number for each tick of both axes, and the labels of the axes."""
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in y.list_ticks():
        row = _locate_row(y, tick)
        yield f'<path d="M{_LEFT} {row} H{right}" stroke="var(--line)"/>'
        yield _draw_text(_LEFT - 6, row + 4, _format_tick(tick), "end")
    for tick in x.list_ticks():
        column = _locate_column(x, tick)
        yield f'<path d="M{column} {_TOP} V{bottom}" stroke="var(--line)"/>'
        yield _draw_text(column, bottom + 14, _format_tick(tick), "middle")
    yield _draw_text(right, _HEIGHT - 4, x.label, "end")
    yield _draw_text(2, 11, y.label, "start")


def _draw_line(line: Line, pixels: Sequence[Point], colour: str) -> Iterable[str]:
    """Yield SVG elements: a polyline through `pixels` and, if the line has dots, a circle with a tooltip per point.

    Args:
        line: The line, whose points the tooltips name.
        pixels: Position (column, row) of each point.
        colour: CSS colour.
    """
    path = " ".join(f"{column},{row}" for column, row in pixels)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
    if line.dots:
        for (column, row), (x, y) in zip(pixels, line.points):
            tooltip = escape(f"{line.name}: {y:,.4g} at {x:,.4g}")
            yield f'<circle cx="{column}" cy="{row}" r="3" fill="{colour}"><title>{tooltip}</title></circle>'


def _draw_text(x: float, y: float, text: str, anchor: str) -> str:
    """Return an SVG text element at a position in pixels; `anchor` is start, middle or end."""
    return f'<text class="soft" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _format_tick(tick: float) -> str:
    """Return the number of a tick as text.

    Whole numbers, and numbers from 1,000 on, have no decimals; others have three significant digits.
    """
    return f"{tick:,.0f}" if abs(tick) >= 1000 or tick == round(tick) else f"{tick:.3g}"

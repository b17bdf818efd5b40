"""Charts of a page as SVG: lines over a linear or logarithmic axis, without scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    """A named line through points; `dots` marks each of them."""

    name: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, with what its values are."""

    words: str
    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def around(cls, words: str, values: Iterable[float], logarithmic: bool = False) -> Scale:
        """The axis that holds some values: from 0 on, or, where it is logarithmic, those above 0."""
        known = list(values)
        if not logarithmic:
            return cls(words, 0.0, max(known, default=0.0) or 1.0)
        positive = [each for each in known if each > 0] or [1.0]
        low, high = min(positive), max(positive)
        return cls(words, low, high if high > low else 10 * low, True)

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1; one below the axis lies at its beginning."""
        if self.logarithmic:
            value = max(value, self.low)
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values along the axis, a handful."""
        if self.logarithmic:
            first, last = floor(log10(self.low)), ceil(log10(self.high))
            steps = (1, 2, 5) if last - first <= 2 else (1,)
            every = max(1, -(-(last - first) // _MOST_TICKS))
            values = [step * 10.0**power for power in range(first, last + 1, every) for step in steps]
            return [each for each in values if self.low <= each <= self.high]
        size = 10.0 ** floor(log10((self.high - self.low) / 4))
        step = next(
            each * size for each in (1, 2, 5, 10) if (self.high - self.low) / (each * size) < _MOST_TICKS
        )
        return [number * step for number in range(ceil(self.low / step), floor(self.high / step) + 1)]


def chart(
    title: str, x: Scale, y: Scale, lines: Sequence[Line], mark: tuple[str, float] | None = None
) -> str:
    """A chart with its heading and a key; `mark` is a value of x with what it is."""
    key = "".join(
        f'<span class="key"><i style="background:{_colour(number)}"></i>{escape(each.name)}</span>'
        for number, each in enumerate(lines)
    )
    drawn = [*_axes(x, y), *_mark(x, mark)]
    for number, each in enumerate(lines):
        drawn += _line(each, _colour(number), _at(x, y))
    return (
        f'<h3>{escape(title)}</h3>\n<p>{key}</p>\n<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" '
        f'aria-label="{escape(title)}">\n' + "\n".join(drawn) + "\n</svg>"
    )


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _at(x: Scale, y: Scale) -> Callable[[Point], Point]:
    def at(point: Point) -> Point:
        across, up = x.place(point[0]), y.place(point[1])
        return (
            round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * across, 1),
            round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * up, 1),
        )

    return at


def _axes(x: Scale, y: Scale) -> Iterable[str]:
    at, bottom, right = _at(x, y), _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in y.ticks():
        level = at((x.low, value))[1]
        yield f'<path d="M{_LEFT} {level} H{right}" stroke="var(--line)"/>'
        yield _text(_LEFT - 6, level + 4, _number(value), "end")
    for value in x.ticks():
        place = at((value, y.low))[0]
        yield f'<path d="M{place} {_TOP} V{bottom}" stroke="var(--line)"/>'
        yield _text(place, bottom + 14, _number(value), "middle")
    yield _text(right, _HEIGHT - 4, x.words, "end")
    yield _text(2, 11, y.words, "start")


def _mark(x: Scale, mark: tuple[str, float] | None) -> Iterable[str]:
    if mark is not None and x.low <= mark[1] <= x.high:
        place = _at(x, Scale("", 0.0, 1.0))((mark[1], 0.0))[0]
        yield f'<path d="M{place} {_TOP} V{_HEIGHT - _BOTTOM}" stroke="var(--hot)" stroke-dasharray="4 3"/>'
        yield _text(place - 4, _HEIGHT - _BOTTOM - 8, mark[0], "end")


def _line(line: Line, colour: str, at: Callable[[Point], Point]) -> Iterable[str]:
    if not line.points:
        return
    places = " ".join(f"{across},{up}" for across, up in map(at, line.points))
    yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
    if line.dots:
        for point in line.points:
            across, up = at(point)
            words = escape(f"{line.name}: {point[1]:,.4g} at {point[0]:,.4g}")
            yield f'<circle cx="{across}" cy="{up}" r="3" fill="{colour}"><title>{words}</title></circle>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text class="soft" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.3g}"

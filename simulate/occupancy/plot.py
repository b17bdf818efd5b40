"""What memory maps as SVG are drawn with: a plot of bytes over instructions, rectangles, lines, words."""

from __future__ import annotations

from html import escape


class Plot:
    """A rectangle of the picture, with events across and bytes up."""

    def __init__(
        self, left: float, top: float, width: float, height: float, events: int, end_byte: int
    ) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height
        self.events, self.end_byte = events, end_byte

    @property
    def bottom(self) -> float:
        """The lower edge, where byte 0 lies."""
        return self.top + self.height

    def part(self, number: int, parts: int) -> Plot:
        """One of several equal plots below each other that fill this one."""
        height = self.height / parts
        top = self.top + number * height
        return Plot(self.left, top, self.width, height, self.events, self.end_byte)

    def x(self, event: float) -> float:
        """Where an event begins."""
        return self.left + self.width * event / self.events

    def y(self, byte: float) -> float:
        """Where a byte begins, from below."""
        return self.bottom - self.height * byte / self.end_byte


def box(x: float, y: float, width: float, height: float) -> str:
    """The attributes of a rectangle, which is never too small to be seen."""
    return f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{max(height, 0.5):.2f}"'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line of one of the classes in STYLE."""
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def text(x: float, y: float, words: str, kind: str) -> str:
    """Words of one of the classes in STYLE."""
    return f'<text class="{kind.strip()}" x="{x:.2f}" y="{y:.2f}">{escape(words, quote=False)}</text>'

"""SVG elements of memory maps: a plot of bytes over instructions, rectangles, lines, texts."""

from __future__ import annotations

from html import escape


class Plot:
    """Rectangle of an SVG picture with axes: instructions from left to right, bytes from bottom to top.

    Its position and size are in pixels, from the upper left corner of the picture. The axes end at `events`
    instructions and `end_byte` bytes per partition.
    """

    def __init__(
        self, left: float, top: float, width: float, height: float, events: int, end_byte: int
    ) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height
        self.events, self.end_byte = events, end_byte

    @property
    def bottom(self) -> float:
        """Y coordinate in pixels of the lower edge, which is byte 0."""
        return self.top + self.height

    def subplot(self, index: int, count: int) -> Plot:
        """Return plot `index`, from the top, of `count` equally high plots that fill this one, with the same axes."""
        height = self.height / count
        top = self.top + index * height
        return Plot(self.left, top, self.width, height, self.events, self.end_byte)

    def x(self, event: float) -> float:
        """Return the x coordinate in pixels at which an instruction, given by its index, begins."""
        return self.left + self.width * event / self.events

    def y(self, byte: float) -> float:
        """Return the y coordinate in pixels of the lower edge of a byte of the partition."""
        return self.bottom - self.height * byte / self.end_byte


def format_box(x: float, y: float, width: float, height: float) -> str:
    """Return the position and size attributes of an SVG rect, at least 0.3 by 0.5 pixels so that it stays visible."""
    return f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{max(height, 0.5):.2f}"'


def make_line(x1: float, y1: float, x2: float, y2: float, css_class: str) -> str:
    """Return an SVG line element. css_class is a class defined in STYLE."""
    return f'<line class="{css_class}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def make_text(x: float, y: float, content: str, css_class: str) -> str:
    """Return an SVG text element. css_class is a class defined in STYLE, with modifiers after spaces."""
    return f'<text class="{css_class.strip()}" x="{x:.2f}" y="{y:.2f}">{escape(content, quote=False)}</text>'

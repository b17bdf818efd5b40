"""Parts of reports: sentences, names, tables and drawings, for a terminal (through rich) and as HTML.

A report is a list of parts; a part is a string, an object of this module, or any renderable of rich. `nkw.terminal`
prints reports. rich takes about 35 ms to import, so it is imported when a part is drawn on a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Protocol, Union, runtime_checkable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.text import Text

_SHORTEST_NAME = 10  # columns; a narrower name says nothing
_DRAWN_COLUMNS = 80  # of a drawing in HTML

Part = Union["RenderableType", str]

_STYLE = """
.nkw-report { overflow-x: auto; font-size: 13px; line-height: 1.4; }
.nkw-report table { border-collapse: collapse; margin: 0.8em 0; font-variant-numeric: tabular-nums; }
.nkw-report tr, .nkw-report tbody tr:nth-child(odd) { background: none; }
.nkw-report th, .nkw-report td { padding: 0.15em 1.1em 0.15em 0; border: none; text-align: right;
  vertical-align: top; white-space: nowrap; color: inherit; }
.nkw-report thead th { border-bottom: 1px solid rgba(128, 128, 128, 0.6); }
.nkw-report tbody tr:not(.note) td { border-top: 1px solid rgba(128, 128, 128, 0.18); }
.nkw-report .left { text-align: left; }
.nkw-report table.indented { margin: 0.2em 0 0.5em 1.2em; }
.nkw-report .note td { opacity: 0.65; padding-left: 1.2em; text-align: left; white-space: normal;
  font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; }
.nkw-report p { margin: 0; padding-left: 1.2em; text-indent: -1.2em; }
.nkw-report td p { padding: 0; text-indent: 0; white-space: normal; min-width: 16em; }
.nkw-report p.bold { font-weight: 600; }
.nkw-report p.apart { margin-top: 0.8em; }
.nkw-report pre { margin: 0.8em 0; background: none; color: inherit; line-height: 1.2; font-size: 12px;
  font-family: ui-monospace, Menlo, Consolas, monospace; }
"""


@runtime_checkable
class Shown(Protocol):
    """Part of a report that can be converted to HTML; parts without `html` are shown as escaped text."""

    def html(self) -> str:
        """Return the part as HTML with escaped text."""


@dataclass(frozen=True)
class Name:
    """Text `lead` followed by a name, such as a path with a line; a narrow column cuts the beginning of the name."""

    words: str
    lead: str = ""

    def html(self) -> str:
        """Return `lead` and the whole name as escaped HTML."""
        return escape(self.lead + self.words)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.cells import cell_len
        from rich.measure import Measurement

        columns = cell_len(self.lead + self.words)
        return Measurement(min(columns, cell_len(self.lead) + _SHORTEST_NAME), columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len
        from rich.text import Text

        words = shorten_name(self.words, options.max_width - cell_len(self.lead))
        yield Text(self.lead + words, no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True)
class Hanging:
    """Sentence that is wrapped on a terminal; its lines after the first are indented by `indent` columns.

    `style` is a style of rich on a terminal, and a CSS class in HTML.
    """

    words: str | Text
    indent: int = 2
    style: str = ""

    def html(self) -> str:
        """Return the sentence as an HTML paragraph with the style as its class."""
        attribute = f' class="{self.style}"' if self.style else ""
        return f"<p{attribute}>{escape(str(self.words))}</p>"

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.cells import cell_len
        from rich.measure import Measurement

        columns = cell_len(str(self.words)) + self.indent
        return Measurement(min(columns, 2 * _SHORTEST_NAME), columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        words = Text(self.words, self.style) if isinstance(self.words, str) else self.words
        for number, line in enumerate(words.wrap(console, options.max_width - self.indent)):
            line.rstrip()
            yield Text(" " * self.indent) + line if number else line


@dataclass(frozen=True)
class Table:
    """Table without rules, made by the function `table`, which describes the fields."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Part]]
    left: Sequence[int]
    firm: Sequence[int]
    indent: int
    gap: int

    def html(self, notes: Sequence[str] = ()) -> str:
        """Return the table as HTML.

        Args:
            notes: Note of each row, which becomes a row of its own after it; an empty note adds none.
        """
        heads = "".join(self._cell("th", number, escape(head)) for number, head in enumerate(self.heads))
        out = [f"<thead><tr>{heads}</tr></thead>"] if any(self.heads) else []
        for index, row in enumerate(self.rows):
            cells = (self._cell("td", number, _inside(cell)) for number, cell in enumerate(row))
            out.append(f"<tr>{''.join(cells)}</tr>")
            if index < len(notes) and notes[index]:
                out.append(
                    f'<tr class="note"><td colspan="{len(self.heads)}">{escape(notes[index])}</td></tr>'
                )
        return "\n".join(['<table class="indented">' if self.indent else "<table>", *out, "</table>"])

    def _cell(self, tag: str, column: int, inside: str) -> str:
        return f'<{tag} class="left">{inside}</{tag}>' if column in self.left else f"<{tag}>{inside}</{tag}>"

    def __rich__(self) -> RenderableType:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        made = Table(
            box=None,
            pad_edge=False,
            padding=(0, self.gap, 0, 0),
            show_header=any(self.heads),
            header_style="bold",
        )
        for number, head in enumerate(self.heads):
            to_left = number in self.left
            is_firm = not to_left or number in self.firm
            made.add_column(head, justify="left" if to_left else "right", no_wrap=is_firm)
        for row in self.rows:
            made.add_row(
                *(
                    Text(cell, no_wrap=True, overflow="ellipsis") if isinstance(cell, str) else cell
                    for cell in row
                )
            )
        return Padding(made, (0, 0, 0, self.indent)) if self.indent else made


@dataclass(frozen=True)
class Noted:
    """Table of one-line rows, each followed by its note; a terminal cuts notes to its width."""

    table: Table
    notes: Sequence[str]

    def html(self) -> str:
        """Return the table with its notes as HTML."""
        return self.table.html(self.notes)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment
        from rich.text import Text

        head, *rows = console.render_lines(self.table, options, pad=False)
        yield from (*head, Segment.line())
        for row, note in zip(rows, self.notes, strict=True):
            yield from (*row, Segment.line())
            if note:
                yield Text(f"  {note}", style="dim", no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True)
class Drawn:
    """Drawing of text lines, such as bars.

    `lines` returns the lines for a number of columns; a terminal cuts wider lines.
    """

    lines: Callable[[int], Iterable[str]]

    def html(self) -> str:
        """Return the lines of the drawing for 80 columns as preformatted HTML."""
        return f"<pre>{escape(chr(10).join(self.lines(_DRAWN_COLUMNS)))}</pre>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text("\n".join(self.lines(options.max_width)), no_wrap=True, overflow="crop")


def table(
    heads: str,
    rows: Iterable[Sequence[Part]],
    left: Sequence[int] = (0,),
    firm: Sequence[int] = (),
    indent: int = 0,
    gap: int = 2,
) -> Table:
    """Return a table without rules.

    Args:
        heads: Column heads separated by |; empty for a table without heads.
        rows: Cells of each row. Strings are not wrapped; they are cut if the table is too wide.
        left: Columns that are aligned left; all others are aligned right.
        firm: Left columns whose width is not reduced. Right columns are never reduced.
        indent: Columns before the table on a terminal.
        gap: Columns between cells on a terminal.
    """
    listed = [tuple(row) for row in rows]
    names = heads.split("|") if heads else [""] * max(map(len, listed), default=0)
    return Table(names, listed, left, firm, indent, gap)


def draw_verbatim(lines: Iterable[str]) -> Drawn:
    """Return a drawing of lines that do not depend on the width, such as a map of characters.

    A terminal cuts them at its width.
    """
    return Drawn(lambda columns: lines)


def shorten_name(name: str, columns: int) -> str:
    """Return a name of at most `columns` columns of a terminal.

    A name that is too long loses its folders; if the last component is still too long, its beginning is replaced by an
    ellipsis.
    """
    from rich.cells import cell_len

    if cell_len(name) <= columns:
        return name
    last = name.replace("\\", "/").rpartition("/")[2]
    if cell_len(last) <= columns:
        return last
    while last and cell_len(last) > columns - 1:
        last = last[1:]
    return "…" + last


def as_html(report: Iterable[Part]) -> str:
    """Return a report as one HTML element with its own style, for a notebook or a page.

    An empty string among the parts separates the next paragraph from the previous one.
    """
    out, apart = [], False
    for block in report:
        inside = _inside(block)
        if isinstance(block, str) and inside:
            inside = f"<p>{inside}</p>"
        if apart and inside.startswith("<p"):
            inside = inside.replace("<p>", '<p class="apart">', 1).replace(
                'class="bold"', 'class="bold apart"', 1
            )
        if inside:
            out.append(inside)
        apart = not inside
    return "\n".join(['<div class="nkw-report">', f"<style>{_STYLE}</style>", *out, "</div>"])


def _inside(block: Part) -> str:
    return block.html() if isinstance(block, Shown) else escape(str(block))

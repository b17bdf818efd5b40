"""Output of commands: reports, errors and progress, formatted by rich.

Output on a terminal has the terminal's width, between 60 and 120 columns, and colour unless NO_COLOR is set. Output in
files, pipes and strings has 80 columns and no escape codes, so the text of a report is reproducible.

rich takes about 35 ms to import, so functions import it when they print.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import singledispatch
from io import StringIO
from threading import Event, Thread
from typing import IO, TYPE_CHECKING, TypeVar

from nkw.child import choose_progress_stream
from nkw.errors import LONGEST_MESSAGE, shown
from nkw.report import Hanging, Part, as_html

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = 80
"""The width where the output is no terminal."""
_NARROWEST, _WIDEST = 60, 120  # columns of a terminal that are used
_PATIENCE_SECONDS = 0.5  # before progress is shown
_AGAIN_SECONDS = 0.2  # until it is shown again on a terminal
EVERY_SECONDS = 10.0
"""Between two lines of progress where stderr is no terminal."""
_STYLES = {r"^error\b(\[.*?\])?": "bold red", r"^warning\b(\[.*?\])?": "bold yellow"}
_LONGEST_LINE, _MOST_LINES = 2 * LONGEST_MESSAGE, 200  # of an error; a deadlock has a line for each core

T = TypeVar("T")


def rendered(report: Iterable[Part]) -> str:
    """Return a report as text: 80 columns, no colour, no spaces at the ends of lines."""
    return _text(_console(StringIO()), report)


class Displayed:
    """Base of records that `print` shows as the text of their report, and a notebook as HTML.

    Modules register functions for their classes of records at `report_of` and `html_of`.
    """

    def __str__(self) -> str:
        return rendered(report_of(self)).rstrip("\n")

    def _repr_html_(self) -> str:
        return html_of(self)


@singledispatch
def report_of(record: Displayed) -> list[Part]:
    """Return the parts of the report of a record; modules register a function for each class of records.

    Raises:
        NotImplementedError: No function is registered for the class.
    """
    raise NotImplementedError(f"nothing draws {type(record).__name__}")


@singledispatch
def html_of(record: Displayed) -> str:
    """Return a record as HTML; without a function registered for its class, the HTML of its report."""
    return as_html(report_of(record))


def show(report: Iterable[Part]) -> None:
    """Print a report on stdout, with colour and the terminal's width if stdout is a terminal."""
    # Formatted first and written by `print`, whose errors (a closed pipe, a full disk) the commands handle.
    print(_text(_console(sys.stdout), report), end="")


def show_lines(text: str, file: IO[str] | None = None) -> None:
    """Print lines: unchanged to a file or a pipe, and wrapped on a terminal.

    Control characters are escaped. On a terminal, `error` and `warning` at the beginning of a line are coloured.

    Args:
        text: The lines.
        file: Stream to print to; None is stdout.
    """
    file = file or sys.stdout
    text = shown(text, len(text))
    if file.isatty():
        text = _text(_console(file), map(_line, text.splitlines()))
    print(text, end="" if text.endswith("\n") else "\n", file=file)


def _line(line: str) -> Hanging:
    from rich.text import Text

    words = Text(line)
    for pattern, style in _STYLES.items():
        words.highlight_regex(pattern, style)
    return Hanging(words, len(line) - len(line.lstrip()) + 2)


def error(message: object) -> None:
    """Print "error: " and a message on stderr.

    The middle of a very long message is left out: of more than 200 lines, and of lines of more than 800 characters.
    """
    lines = f"error: {message}".split("\n")
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES // 2 : -_MOST_LINES // 2] = [f"… {len(lines) - _MOST_LINES:,} more lines"]
    show_lines("\n".join(shown(line, _LONGEST_LINE) for line in lines), sys.stderr)


def progress(items: Sequence[T], doing: str, every: float = EVERY_SECONDS) -> Iterator[T]:
    """Yield the items, and show on stderr how many are done if they take long.

    A terminal shows a bar after half a second, which is removed at the end. Other streams get a line every `every`
    seconds.

    Args:
        items: The items; nothing is shown for a single one.
        doing: Name of the work in the message.
        every: Seconds between two lines.
    """
    began, bar = time.monotonic(), None
    told, file = began, choose_progress_stream()
    on_terminal = file.isatty()
    try:
        for number, item in enumerate(items):
            now = time.monotonic()
            if len(items) > 1 and not on_terminal and now - told >= every:
                print(f"{doing}: {number} of {len(items)} done", file=file, flush=True)
                told = now
            elif len(items) > 1 and on_terminal and bar is None and now - began > _PATIENCE_SECONDS:
                from rich.progress import Progress

                bar = Progress(console=_console(file), transient=True)
                task = bar.add_task(doing, total=len(items))
                bar.start()
            if bar is not None:
                bar.update(task, completed=number)
            yield item
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def working(describe: Callable[[], str], every: float = EVERY_SECONDS) -> Iterator[None]:
    """Show on stderr what `describe` returns while the block runs, for blocks that take seconds and print nothing.

    A terminal shows one line, which is removed at the end. Other streams get a line every `every` seconds if it differs
    from the last. A separate thread calls `describe`.
    """
    ended, told = Event(), list[str]()
    file = choose_progress_stream()
    on_terminal = file.isatty()

    def tell() -> None:
        wait = _PATIENCE_SECONDS if on_terminal else every
        while not ended.wait(wait):
            text = shown(describe())
            if on_terminal:
                text = f"\r\x1b[K{text[: _console(file).width - 1]}"
            if on_terminal or told[-1:] != [text]:
                with suppress(OSError, ValueError):
                    print(text, end="" if on_terminal else "\n", file=file, flush=True)
            told.append(text)
            wait = _AGAIN_SECONDS if on_terminal else every

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        if told and on_terminal:
            with suppress(OSError, ValueError):
                print("\r\x1b[K", end="", file=file, flush=True)


def _console(file: IO[str]) -> Console:
    from rich.console import Console

    terminal = file.isatty()
    coloured = terminal and not os.environ.get("NO_COLOR")
    console = Console(
        file=file,
        color_system="auto" if coloured else None,
        width=None if terminal else COLUMNS,
        force_jupyter=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    if terminal:
        console.width = min(max(console.width, _NARROWEST), _WIDEST)
    return console


def _text(console: Console, report: Iterable[Part]) -> str:
    with console.capture() as captured:
        for block in report:
            console.print(block)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().split("\n")[:-1])

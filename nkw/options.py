"""Options of commands as rows of tables: a command names its rows and changes what differs there.

A row has a name and the keywords of `argparse.ArgumentParser.add_argument`. The name is the option's flag, or its flags
with `|` between them; text after `=` tells apart rows of equal flags, such as `--out=DIR` and `--out=CACHE`. A name
without a hyphen is that of a positional argument.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Row = Mapping[str, Any]
"""Keywords of `add_argument`."""
Rows = Mapping[str, Row]
"""Options of one subject by name."""


class Option(NamedTuple):
    """One option of a command: the name of its row, and the keywords of `add_argument`."""

    name: str
    keywords: Row

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the option to a parser."""
        parser.add_argument(*self.name.partition("=")[0].split("|"), **self.keywords)


class OptionTable:
    """Rows of options by name. Raises ValueError if two groups have a row of the same name."""

    def __init__(self, *groups: Rows) -> None:
        self._rows = {name: row for group in groups for name, row in group.items()}
        if len(self._rows) < sum(map(len, groups)):
            raise ValueError("two options have the same name")

    def option(self, name: str, **changes: Any) -> Option:
        """Return the option of a row, with some of its keywords changed."""
        return Option(name, {**self._rows[name], **changes})

    def options(self, *rows: str | Option) -> tuple[Option, ...]:
        """Return the options of a command in the order of its help.

        Args:
            rows: names of rows, separated by blanks, and changed options.
        """
        return tuple(
            option
            for row in rows
            for option in ([row] if isinstance(row, Option) else map(self.option, row.split()))
        )


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add options to a parser."""
    for option in options:
        option.add_to(parser)

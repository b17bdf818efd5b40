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

_LEAST_GROUPS = 3
"""Groups from which on the help of a command shows them."""


class Option(NamedTuple):
    """Option of a command: the name of its row, the keywords of `add_argument`, and its group in the help."""

    name: str
    keywords: Row
    group: str = ""

    @property
    def is_positional(self) -> bool:
        """Whether the option is a positional argument."""
        return not self.name.startswith("-")

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add the option to a parser or to an argument group of a parser."""
        parser.add_argument(*self.name.partition("=")[0].split("|"), **self.keywords)


class OptionTable:
    """Rows of options, from which commands choose.

    Args:
        groups: Rows by name, by the title of their group in the help.

    Raises:
        ValueError: Two rows have the same name.
    """

    def __init__(self, groups: Mapping[str, Rows]) -> None:
        self._rows = {name: (row, title) for title, rows in groups.items() for name, row in rows.items()}
        if len(self._rows) < sum(map(len, groups.values())):
            raise ValueError("two options have the same name")

    def option(self, name: str, **changes: Any) -> Option:
        """Return the option of the row `name`, in which `changes` replace or add keywords."""
        row, title = self._rows[name]
        return Option(name, {**row, **changes}, title)

    def options(self, *rows: str | Option) -> tuple[Option, ...]:
        """Return the options of a command in the order of its help.

        Args:
            *rows: Names of rows, separated by blanks in one text, and changed options.

        Raises:
            KeyError: There is no row of a name.
        """
        return tuple(
            option
            for row in rows
            for option in ([row] if isinstance(row, Option) else map(self.option, row.split()))
        )


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add options to a parser, each in the group of its title.

    A command whose options have fewer than three titles has no groups.
    """
    options = tuple(options)
    titles = {option.group for option in options if not option.is_positional}
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for option in options:
        title = "" if option.is_positional or len(titles) < _LEAST_GROUPS else option.group
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        option.add_to(groups[title])

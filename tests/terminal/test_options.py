"""Tables of options: names of rows, changes of a command, and what argparse makes of them."""

from __future__ import annotations

import argparse

import pytest

from nkw.options import OptionTable, add_options

RANKS = {"--tp": dict(type=int, default=1), "--pp": dict(type=int)}
OUTPUTS = {"--out=DIR": dict(metavar="DIR"), "--as-error|--error": dict(), "folder": dict()}


def parse(table: OptionTable, rows: tuple[str, ...], *words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_options(parser, table.options(*rows))
    return vars(parser.parse_args(words))


def test_rows_are_named_in_one_text_or_several() -> None:
    table = OptionTable(RANKS, OUTPUTS)
    words = ("here", "--tp", "2", "--out", "there", "--error", "all")
    expected = {"folder": "here", "tp": 2, "out": "there", "as_error": "all"}
    assert parse(table, ("folder --tp --out=DIR --as-error|--error",), *words) == expected
    assert parse(table, ("folder", "--tp --out=DIR", "--as-error|--error"), *words) == expected


def test_a_command_changes_a_row_for_itself_alone() -> None:
    table = OptionTable(RANKS, OUTPUTS)
    parser = argparse.ArgumentParser()
    add_options(parser, table.options("--pp", table.option("--tp", default=4)))
    assert vars(parser.parse_args([])) == {"pp": None, "tp": 4}
    assert parse(table, ("--tp",)) == {"tp": 1}


def test_two_groups_share_no_name() -> None:
    OptionTable(RANKS, OUTPUTS)
    with pytest.raises(ValueError, match="two options have the same name"):
        OptionTable(RANKS, {"--tp": dict()})


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(KeyError, match="--ep"):
        OptionTable(RANKS).options("--tp --ep")

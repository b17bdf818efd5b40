"""Tables of options: names of rows, changes of a command, and what argparse makes of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

import pytest

from nkw.cluster import LOCAL
from nkw.commands import load
from nkw.options import OptionTable, add_options
from nkw.verbs import MODEL_VERBS, SIMULATOR_VERBS, Verb
from simulate.check import Format
from simulate.timing import Reading
from simulate.tune.measuring import READINGS, WORSE

RANKS = {"--tp": dict(type=int, default=1), "--pp": dict(type=int)}
OUTPUTS = {"--out=DIR": dict(metavar="DIR"), "--as-error|--error": dict(), "folder": dict()}


def parse(table: OptionTable, rows: tuple[str, ...], *words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser, table.options(*rows))
    return vars(parser.parse_args(words))


def test_rows_are_named_in_one_text_or_several() -> None:
    table = OptionTable({"ranks": RANKS, "reports": OUTPUTS})
    words = ("here", "--tp", "2", "--out", "there", "--error", "all")
    expected = {"folder": "here", "tp": 2, "out": "there", "as_error": "all"}
    assert parse(table, ("folder --tp --out=DIR --as-error|--error",), *words) == expected
    assert parse(table, ("folder", "--tp --out=DIR", "--as-error|--error"), *words) == expected


def test_a_command_changes_a_row_for_itself_alone() -> None:
    table = OptionTable({"ranks": RANKS, "reports": OUTPUTS})
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser, table.options("--pp", table.option("--tp", default=4)))
    assert vars(parser.parse_args([])) == {"pp": None, "tp": 4}
    assert parse(table, ("--tp",)) == {"tp": 1}


def test_two_groups_share_no_name() -> None:
    OptionTable({"ranks": RANKS, "reports": OUTPUTS})
    with pytest.raises(ValueError, match="two options have the same name"):
        OptionTable({"ranks": RANKS, "more": {"--tp": dict()}})


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(KeyError, match="--ep"):
        OptionTable({"ranks": RANKS}).options("--tp --ep")


def list_functions(verbs: Mapping[str, Verb]) -> Iterator[str]:
    """Yield the functions of commands, also of commands of two words."""
    for verb in verbs.values():
        yield from list_functions(verb.verbs) if verb.verbs else [verb.function]


@pytest.mark.parametrize("function", list_functions({**MODEL_VERBS, **SIMULATOR_VERBS}))
def test_every_command_has_its_function_where_the_table_says(function: str) -> None:
    assert callable(load(function))


def test_choices_are_those_that_the_simulator_knows() -> None:
    keywords = {
        name: {option.name: option.keywords for option in load(SIMULATOR_VERBS[name].options)}
        for name in ("time", "check", "tune", "calibrate")
    }
    assert keywords["time"]["--reading"]["choices"] == [reading.value for reading in Reading]
    assert keywords["check"]["--format"]["choices"] == [form.value for form in Format]
    assert keywords["tune"]["--reading"]["choices"] == list(READINGS)
    assert keywords["tune"]["--reading"]["default"] == WORSE
    assert f" or {LOCAL} to start one here" in keywords["tune"]["--cluster"]["help"]
    assert set(keywords["calibrate"]["--reading"]["choices"]) < set(keywords["time"]["--reading"]["choices"])


def read_titles(parser: argparse.ArgumentParser) -> list[str]:
    return [line[:-1] for line in parser.format_help().splitlines() if line.endswith(":") and line[0] != " "]


def test_help_shows_the_groups_of_a_command_with_three_or_more() -> None:
    table = OptionTable({"ranks": RANKS, "reports": OUTPUTS, "chip": {"--target": dict()}})
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser, table.options("folder --tp --out=DIR --pp --target"))
    assert read_titles(parser)[-3:] == ["ranks", "reports", "chip"]
    few = argparse.ArgumentParser(allow_abbrev=False)
    add_options(few, table.options("folder --tp --out=DIR --pp"))
    assert "ranks" not in read_titles(few)
    assert vars(parser.parse_args(["here", "--tp", "2"])) == {
        "folder": "here", "tp": 2, "out": None, "pp": None, "target": None,
    }  # fmt: skip

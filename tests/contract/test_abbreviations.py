"""No parser of options takes abbreviated names: a new option would change what an old command line means."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("nkw", "simulate", "model", "nki_kernels", "tools", "benchmarks", "tests")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def calls_of_parsers(source: str) -> list[ast.Call]:
    """Return the calls of `ArgumentParser` and `add_parser`."""
    names = ("ArgumentParser", "CommandOptions", "add_parser")
    nodes = ast.walk(ast.parse(source))
    return [
        node
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names
    ]


def abbreviates(call: ast.Call) -> bool:
    """Return whether a parser takes abbreviated names; a command of `add_parser` with `help` alone has no options."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if set(keywords) == {"help"}:
        return False
    value = keywords.get("allow_abbrev")
    return not (isinstance(value, ast.Constant) and value.value is False)


def test_no_parser_takes_abbreviated_names() -> None:
    abbreviating = {
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in SOURCES
        if "Parser(" in (text := path.read_text(encoding="utf-8")) or "add_parser(" in text
        for call in calls_of_parsers(text)
        if abbreviates(call)
    }
    assert abbreviating == set()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("argparse.ArgumentParser()", True),
        ("argparse.ArgumentParser(allow_abbrev=True)", True),
        ("ArgumentParser(prog='x', allow_abbrev=False)", False),
        ("commands.add_parser(name, help='x')", False),
        ("commands.add_parser(name, help='x', description='y')", True),
    ],
)
def test_what_an_abbreviating_parser_is(call: str, expected: bool) -> None:
    assert [abbreviates(node) for node in calls_of_parsers(call)] == [expected]

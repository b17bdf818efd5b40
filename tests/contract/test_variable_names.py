"""Variables, parameters, attributes, functions and classes are named after their contents.

A pronoun, a participle or a place says nothing about a thing: `own`, `each`, `found`. Words that are right in some
places, such as the `value` of a key, may occur as often as they do today and no oftener.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("simulate", "model", "nki_kernels", "nkw")
REST = ("tests", "tools", "benchmarks", "notebooks", "docs")
FORBIDDEN = frozenset(
    """
    asked beside besides each found given held here kind kinds of others own part parts place places rest said these
    there thing things those at what which whole
    """.split()
)
"""As whole names; `page_kind` and `last_part` say of what."""
FORBIDDEN_PREFIXES = ("of_", "own_")
CAPS = {
    PRODUCT: {
        "item": 35,
        "result": 327,
        "value": 303,
        "data": 82,
        "left": 80,
        "one": 29,
        "other": 103,
        "drawn": 8,
        "wanted": 19,
    },
    REST: {
        "item": 12,
        "result": 338,
        "value": 280,
        "data": 207,
        "left": 155,
        "one": 126,
        "other": 184,
        "drawn": 26,
        "wanted": 125,
    },
}
"""Largest number of times that programs and notebooks bind each name, with or without a leading underscore."""


def list_names(source: str) -> Iterator[str]:
    """Yield every name that a program binds, without leading underscores, once for each place."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name.lstrip("_")
            case ast.arg(arg=name):
                yield name.lstrip("_")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name.lstrip("_")
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield name.lstrip("_")
            case ast.alias(asname=str(name)):
                yield name.lstrip("_")


def is_forbidden(name: str) -> bool:
    """Return whether a name without leading underscores says nothing about the thing that it names."""
    return name in FORBIDDEN or name.startswith(FORBIDDEN_PREFIXES)


def read_sources(folder: Path) -> Iterator[str]:
    """Yield the programs below a folder: modules, and the code cells of each notebook together."""
    for path in folder.rglob("*.py"):
        yield path.read_text(encoding="utf-8")
    for path in folder.rglob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def count_names(folders: tuple[str, ...]) -> Counter[str]:
    """Return how often the programs below folders bind each name."""
    return Counter(
        name for folder in folders for source in read_sources(ROOT / folder) for name in list_names(source)
    )


@pytest.mark.parametrize("folders", CAPS, ids=["product", "rest"])
def test_names_say_what_they_name(folders: tuple[str, ...]) -> None:
    counts = count_names(folders)
    assert {name: count for name, count in counts.items() if is_forbidden(name)} == {}
    assert {name: counts[name] for name, cap in CAPS[folders].items() if counts[name] > cap} == {}


@pytest.mark.parametrize(
    ("source", "forbidden"),
    [
        ("own = 1", ["own"]),
        ("self._found = 1", ["found"]),
        ("for each in pages: pass", ["each"]),
        ("f = lambda what: what", ["what"]),
        ("def of_the_user(): pass", ["of_the_user"]),
        ("import numpy as other, math as rest", ["rest"]),
        ("try:\n    pass\nexcept OSError as given:\n    pass", ["given"]),
        ("match x:\n    case [first, *others]:\n        pass", ["others"]),
        ("page_kind = last_part = other_rows = 1", []),
        ("print(own, each.found)", []),
    ],
)
def test_what_a_forbidden_name_is(source: str, forbidden: list[str]) -> None:
    assert [name for name in list_names(source) if is_forbidden(name)] == forbidden

"""The documented sentences of every argument of `nki.isa`, `nki.collectives` and `nki.language`, with their rules."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent
MODULES = ("isa", "collectives", "language")


@dataclass(frozen=True)
class Row:
    """One argument of one instruction or function; `free` says why no sentence limits it, where `rules` is empty."""

    module: str
    instruction: str
    argument: str
    documented: tuple[str, ...]
    rules: tuple[str, ...]
    free: str

    @property
    def codes(self) -> frozenset[str]:
        """The codes of the row's rules, with those of its groups."""
        return expand(self.rules)


@dataclass(frozen=True)
class Page:
    """The sentences of an instruction that name no argument, and the rules that hold them.

    `functions` are the names that the page describes: the instruction, or functions with the same sentences.
    """

    module: str
    instruction: str
    functions: tuple[str, ...]
    source: str
    sentences: tuple[str, ...]
    codes: frozenset[str]


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


@lru_cache(1)
def read_groups() -> dict[str, tuple[str, ...]]:
    """Return the rules of each group, by the name of the group."""
    return {name: tuple(codes) for name, codes in read_toml(FOLDER / "groups.toml").items()}


def expand(rules: tuple[str, ...]) -> frozenset[str]:
    """Return codes, with each name of a group replaced by its codes."""
    groups = read_groups()
    return frozenset(code for rule in rules for code in groups.get(rule, (rule,)))


@lru_cache(1)
def read_table() -> tuple[tuple[Page, ...], tuple[Row, ...]]:
    """Return all pages and all rows, in the order of modules and file names."""
    pages, rows = [], []
    for module in MODULES:
        for path in sorted((FOLDER / module).glob("*.toml")):
            content = read_toml(path)
            functions = tuple(content.get("functions", (path.stem,)))
            arguments = {name: row for name, row in content.items() if isinstance(row, dict)}
            pages.append(
                Page(
                    module,
                    path.stem,
                    functions,
                    content["source"],
                    tuple(content["page"]),
                    expand(tuple(content["page_rules"])),
                )
            )
            for name, row in arguments.items():
                rules, free = tuple(row.get("rules", ())), row.get("free", "")
                documented = tuple(row["documented"])
                rows += [Row(module, function, name, documented, rules, free) for function in functions]
    return tuple(pages), tuple(rows)

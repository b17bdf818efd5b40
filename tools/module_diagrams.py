"""Writes text diagrams of the modules of packages into docs/model.

A line of a diagram has modules that import modules of lower lines only. A page has a diagram for each package that a
mark names: `<!-- Modules of model/engine, written by make docs. -->`.

    python -m tools.module_diagrams
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "model"
_DIAGRAM = re.compile(r"(<!-- Modules of (\S+), written by make docs\. -->\n```\n).*?(```\n)", re.DOTALL)
_WIDTH = 100


def write_diagrams() -> None:
    """Update the diagrams in all pages."""
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(update_page(page.read_text(encoding="utf-8")), encoding="utf-8")


def update_page(text: str) -> str:
    """Return the text of a page with each diagram replaced by that of today's modules."""
    return _DIAGRAM.sub(lambda match: match[1] + format_diagram(match[2]) + match[3], text)


def format_diagram(package: str) -> str:
    """Return one line for each level of a package's modules; a module imports modules of lower lines only."""
    imports = {path: read_imports(path, package) for path in _modules(package)}

    @cache
    def level(path: Path) -> int:
        return 1 + max((level(imported) for imported in imports[path]), default=0)

    lines = []
    for number in sorted({level(path) for path in imports}, reverse=True):
        names = sorted(_name(path, package) for path in imports if level(path) == number)
        arrow = " ↓ " if lines else "   "
        text = ", ".join(names)
        lines.append(textwrap.fill(text, _WIDTH, initial_indent=arrow, subsequent_indent="   ") + "\n")
    return "".join(lines)


def read_imports(path: Path, package: str) -> set[Path]:
    """Return the modules of a package that a module imports when it runs; imports for type checkers are left out."""
    names = set(_imported_names(ast.parse(path.read_text(encoding="utf-8"))))
    return {module for module in _modules(package) if _dotted(module) in names and module != path}


def _imported_names(node: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a syntax tree imports, and what it imports from them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.module is not None:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        yield from _imported_names(child)


def _modules(package: str) -> list[Path]:
    """Return the files of a package and its folders, without those that only describe a folder."""
    return [path for path in sorted((ROOT / package).rglob("*.py")) if path.name != "__init__.py"]


def _dotted(path: Path) -> str:
    """Return the dotted module name of a file of the repository."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _name(path: Path, package: str) -> str:
    """Return the name of a module within its package, as a diagram shows it."""
    return path.relative_to(ROOT / package).with_suffix("").as_posix()


if __name__ == "__main__":
    write_diagrams()

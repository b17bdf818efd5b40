"""The names of NKI that public code uses, and those of them that the simulator does not have.

    python tests/foreign/names.py FOLDER …

Reads every Python file under the folders, and the Python blocks of pages (.rst, .md) and notebooks; follows `import`
and `from … import` of `nki` and `neuronxcc.nki` to attribute chains such as `nisa.dge_mode.hwdge`. Prints each chain
that does not resolve with its number of uses and one place, most used first. Nothing that is read is executed.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

_ROOTS = ("nki", "neuronxcc.nki")
_RST_BLOCK = re.compile(r"^( *)\.\. (?:code-block|code|testcode):: *(?:python3?)?\s*$")
_MD_BLOCK = re.compile(r"```(?:python|py)\n(.*?)```", re.DOTALL)


def uses(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Return the dotted names of NKI that the files under `folders` use, each with the places, as `file:line`."""
    places_by_name: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".rst", ".md", ".ipynb", ".txt") and path.is_file():
                for name, line in _file_uses(path):
                    places_by_name.setdefault(name, []).append(f"{path}:{line}")
    return places_by_name


def missing(names: Sequence[str]) -> list[str]:
    """Return the dotted names that the modules bound to `nki` and `neuronxcc.nki` do not have."""
    return [name for name in names if not _resolves(name)]


def _file_uses(path: Path) -> Iterator[tuple[str, int]]:
    for source in _sources(path):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        yield from _tree_uses(tree)


def _sources(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        yield text
    elif path.suffix == ".md":
        # The names a page imports in one block stand for all of its blocks.
        yield from _joined(match.group(1) for match in _MD_BLOCK.finditer(text))
    elif path.suffix == ".ipynb":
        try:
            cells = json.loads(text).get("cells", [])
        except (json.JSONDecodeError, AttributeError):
            return
        yield from _joined("".join(c.get("source", [])) for c in cells if c.get("cell_type") == "code")
    else:
        yield from _joined(rst_blocks(text))


def rst_blocks(text: str) -> Iterator[str]:
    """Yield the Python blocks of a reStructuredText page, dedented."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        match = _RST_BLOCK.match(lines[index])
        index += 1
        if match is None:
            continue
        indent = len(match.group(1))
        block = []
        while index < len(lines) and (not lines[index].strip() or _indent(lines[index]) > indent):
            if not lines[index].strip().startswith(":"):
                block.append(lines[index])
            index += 1
        yield textwrap.dedent("\n".join(block)) + "\n"


def _joined(blocks: Iterator[str]) -> Iterator[str]:
    kept = []
    for block in blocks:
        try:
            ast.parse(block)
        except (SyntaxError, ValueError):
            continue
        kept.append(block)
    if kept:
        yield "\n".join(kept)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_nki(module: str) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in _ROOTS)


def _tree_uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_nki(alias.name):
                    yield alias.name, node.lineno
                    if alias.asname:
                        aliases[alias.asname] = alias.name
                    elif alias.name.startswith("nki"):
                        aliases["nki"] = "nki"
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if _is_nki(name) and alias.name != "*":
                    yield name, node.lineno
                    aliases[alias.asname or alias.name] = name
    chains: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in chains:
            continue
        components: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            chains.add(id(inner))
            components.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in aliases:
            yield ".".join([aliases[inner.id], *reversed(components)]), node.lineno


def _resolves(name: str) -> bool:
    components = name.split(".")
    start = 2 if components[0] == "neuronxcc" else 1
    try:
        value: object = importlib.import_module(".".join(components[:start]))
    except ImportError:
        return False
    for index, component in enumerate(components[start:], start):
        if isinstance(value, ModuleType):
            try:
                value = importlib.import_module(".".join(components[: index + 1]))
                continue
            except ImportError:
                pass
        if not hasattr(value, component):
            # What hangs on a class or an instance may be made at run time; what hangs on a module may not.
            return not isinstance(value, ModuleType)
        value = getattr(value, component)
    return True


def main(folders: Sequence[str]) -> int:
    """Print the missing names; returns 0 if there are none."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import simulate

    simulate.install("simulate")
    places_by_name = uses([Path(folder) for folder in folders])
    lacking = sorted(missing(list(places_by_name)), key=lambda name: (-len(places_by_name[name]), name))
    for name in lacking:
        print(f"{len(places_by_name[name]):5d}  {name:60s} {places_by_name[name][0]}")
    print(f"{len(places_by_name)} names used, {len(lacking)} of them missing")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The source files that a kernel needs where this project is not installed: its own file and what it imports."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from nkw.files import MOST_SOURCE_BYTES, read_text
from simulate.bundle.reading import refused

_INSTALLED = frozenset({"nki", "neuronxcc", "numpy", "ml_dtypes", "torch"})
"""Packages that are there with the vendor's SDK."""
_SIMULATOR = "simulate"
_EMPTY = '"""The package of these kernels; what it holds beside them stayed behind."""\n'
_PACKAGES_FOLDERS = ("site-packages", "dist-packages")


@dataclass
class Sources:
    """Files by their paths below `sources/`, and the packages that have to be installed beside the SDK."""

    files: dict[str, str] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)


def module_of(kernel: Callable[..., Any], words: str) -> tuple[str, Path]:
    """The module that has to be imported for the function that FILE.py:NAME or MODULE:NAME names, and its file."""
    place = words.rpartition(":")[0]
    code = getattr(kernel, "__code__", None)
    if not isinstance(code, CodeType):
        raise refused(f"{words:.60} is no function of a file")
    if place.endswith(".py"):
        return Path(place).stem, Path(place).resolve()
    found = sys.modules.get(kernel.__module__)
    if found is None or not hasattr(found, code.co_name):
        raise refused(f"{words:.60} cannot be imported by its name {kernel.__module__}.{code.co_name}")
    return kernel.__module__, Path(code.co_filename).resolve()


def collect(sources: Sources, module: str, file: Path) -> str:
    """Add a module and everything that it imports to `sources`; returns the name under which it imports NKI.

    Files travel as they are. The standard library and what the vendor's SDK brings stay behind; other packages that are
    installed are listed. The `__init__` of a package that imports the simulator is replaced by an empty one. Raises
    InvalidArgument where another file imports it, or cannot be read.
    """
    _add(sources, module, file, module.partition(".")[0])
    names = set(_imports(ast.parse(read_text(file, MOST_SOURCE_BYTES)), module, False))
    return "neuronxcc.nki" if any(name.startswith("neuronxcc") for name in names) else "nki"


def _add(sources: Sources, module: str, file: Path, own: str) -> None:
    is_package = file.name == "__init__.py"
    path = module.replace(".", "/") + ("/__init__.py" if is_package else ".py")
    if path in sources.files:
        return
    try:
        text = read_text(file, MOST_SOURCE_BYTES)
        names = list(dict.fromkeys(_imports(ast.parse(text), module, is_package)))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise refused(f"{file} cannot be read: {error}") from None
    if any(name.partition(".")[0] == _SIMULATOR for name in names):
        if not is_package:
            raise refused(
                f"{file} imports the simulator, which is not there on an instance: import nki instead"
            )
        text, names = _EMPTY, []
    sources.files[path] = text
    parent = module.rpartition(".")[0]
    for name in [*([parent] if parent else []), *names]:
        _add_imported(sources, name, own)


def _add_imported(sources: Sources, name: str, own: str) -> None:
    """Add an imported module, unless it comes with Python or the SDK, or is the name of something in a module."""
    top = name.partition(".")[0]
    if top in _INSTALLED or top in sys.stdlib_module_names:
        return
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return
    if found is None or found.origin is None:
        return
    file = Path(found.origin).resolve()
    if top != own and any(each in file.parts for each in _PACKAGES_FOLDERS):
        sources.packages.add(top)
    elif file.suffix == ".py":
        _add(sources, name, file, own)


def _imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """The absolute names of what a file imports; of `from a import b` both `a` and `a.b`, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{each.name}" for each in node.names)

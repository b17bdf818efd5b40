"""Source files that a kernel needs without this project: its own file and the files that it imports."""

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
from simulate.bundle.reading import make_error

_INSTALLED = frozenset({"nki", "neuronxcc", "numpy", "ml_dtypes", "torch"})
"""Packages that the vendor's SDK installs."""
_SIMULATOR = "simulate"
_EMPTY = '"""The package of these kernels; what it holds beside them stayed behind."""\n'
_PACKAGES_FOLDERS = ("site-packages", "dist-packages")


@dataclass
class Sources:
    """Texts of source files by their paths below `sources/`, and the packages to install in addition to the SDK."""

    files: dict[str, str] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)


def find_module(kernel: Callable[..., Any], kernel_name: str) -> tuple[str, Path]:
    """Return the module to import for a kernel, and its file.

    Args:
        kernel: The plain Python function.
        kernel_name: FILE.py:NAME or MODULE:NAME, as the command line has it. FILE.py gives the module FILE.

    Raises:
        InvalidArgument: If the kernel is no function of a file, or cannot be imported by its name.
    """
    module_or_file = kernel_name.rpartition(":")[0]
    code = getattr(kernel, "__code__", None)
    if not isinstance(code, CodeType):
        raise make_error(
            f"{kernel_name:.60} is a {type(kernel).__name__}; a bundle copies the file of a kernel: name a Python "
            "function that a .py file defines"
        )
    if module_or_file.endswith(".py"):
        return Path(module_or_file).stem, Path(module_or_file).resolve()
    module = sys.modules.get(kernel.__module__)
    if module is None or not hasattr(module, code.co_name):
        raise make_error(
            f"{kernel_name:.60} cannot be imported as {kernel.__module__}.{code.co_name}, which run.py does: define "
            "the kernel at the top level of its module, under the name of its function"
        )
    return kernel.__module__, Path(code.co_filename).resolve()


def collect_sources(sources: Sources, module: str, file: Path) -> str:
    """Add a module and everything that it imports to `sources`; return how the module imports NKI.

    The name is "neuronxcc.nki" if the module imports neuronxcc, else "nki". Files are copied unchanged. The
    standard library and packages of the SDK are left out; further installed packages are listed in
    `sources.packages`. The `__init__` of a package that imports the simulator is replaced by an empty file.

    Raises:
        InvalidArgument: If a file cannot be read, or if a module other than an `__init__` imports the
            simulator.
    """
    _add_file(sources, module, file, module.partition(".")[0])
    names = set(_list_imports(ast.parse(read_text(file, MOST_SOURCE_BYTES)), module, False))
    return "neuronxcc.nki" if any(name.startswith("neuronxcc") for name in names) else "nki"


def _add_file(sources: Sources, module: str, file: Path, kernel_package: str) -> None:
    """Add a file and, recursively, the files that it imports; does nothing if the module was added before.

    Args:
        kernel_package: First part of the name of the kernel's module, whose files are copied even if they are
            installed.

    Raises:
        InvalidArgument: If a file cannot be read, or if a module other than an `__init__` imports the
            simulator.
    """
    is_package = file.name == "__init__.py"
    path = module.replace(".", "/") + ("/__init__.py" if is_package else ".py")
    if path in sources.files:
        return
    try:
        text = read_text(file, MOST_SOURCE_BYTES)
        names = list(dict.fromkeys(_list_imports(ast.parse(text), module, is_package)))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise make_error(f"{file} cannot be read: {error}") from None
    if any(name.partition(".")[0] == _SIMULATOR for name in names):
        if not is_package:
            raise make_error(
                f"{file} imports the simulator, which is not there on an instance: import nki instead"
            )
        text, names = _EMPTY, []
    sources.files[path] = text
    parent = module.rpartition(".")[0]
    for name in [*([parent] if parent else []), *names]:
        _add_imported(sources, name, kernel_package)


def _add_imported(sources: Sources, name: str, kernel_package: str) -> None:
    """Add an imported module, or the name of its package if that is installed.

    Does nothing for modules of Python and the SDK, and for names that are no module, such as a function that
    a module defines.
    """
    top = name.partition(".")[0]
    if top in _INSTALLED or top in sys.stdlib_module_names:
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return
    if spec is None or spec.origin is None:
        return
    file = Path(spec.origin).resolve()
    if top != kernel_package and any(folder in file.parts for folder in _PACKAGES_FOLDERS):
        sources.packages.add(top)
    elif file.suffix == ".py":
        _add_file(sources, name, file, kernel_package)


def _list_imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yield the absolute names of imported modules.

    For `from a import b` these are `a` and `a.b`, which may be a module.

    Args:
        tree: Syntax tree of the module.
        module: Name of the module, from which relative imports start.
        is_package: Whether the module is an `__init__`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                name_parts = module.split(".")
                parent_parts = name_parts[: len(name_parts) - node.level + is_package]
                base = ".".join([*parent_parts, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)

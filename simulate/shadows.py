"""Check for modules of a user that have the name of a package of this project, so that one hides the other."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from nkw.errors import InvalidArgument
from nkw.files import MOST_SOURCE_BYTES, is_file, read_text

_PACKAGES = ("nkw", "simulate", "model", "nki_kernels")
_ROOT = Path(__file__).resolve().parents[1]


def check_names(words: str, folder: Path) -> None:
    """Raise InvalidArgument if a script imports a file that has the name of a package of this project.

    Modules that the script imports from `folder` or the working folder are searched in turn; a file that nothing
    imports hides nothing.

    Args:
        words: The script, or FILE.py:KERNEL or MODULE:KERNEL.
        folder: The folder from which it imports first; the working folder follows if it is on Python's path.
    """
    working_folder = Path.cwd()
    folders = [folder, *([working_folder] if not {"", str(working_folder)}.isdisjoint(sys.path) else [])]
    path = Path(words) if is_file(words) else Path(words.rpartition(":")[0])
    names = set(_list_imports(path)) if is_file(path) else {str(path).split(".")[0]}
    seen = {path.resolve()}
    while names:
        name = names.pop()
        file = _find_module(name, folders)
        if file is None or file.resolve() in seen:
            continue
        if name in _PACKAGES and not file.resolve().is_relative_to(_ROOT / name):
            raise InvalidArgument(
                "NKW-SHADOWED",
                f"{file.parent if file.stem == '__init__' else file} has the name of the package {name} of NKI "
                f"Workbench, and `import {name}` can mean one of them only: rename the former",
            )
        seen.add(file.resolve())
        names |= set(_list_imports(file))


def _find_module(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of a top-level module in the first folder that has it, or None; packages come first."""
    paths = (file for folder in folders for file in (folder / name / "__init__.py", folder / f"{name}.py"))
    return next((file for file in paths if is_file(file)), None)


def _list_imports(file: Path) -> Iterator[str]:
    """Yield the top-level names of the modules that a file imports absolutely; none if it cannot be read or parsed."""
    with suppress(
        OSError, SyntaxError, ValueError, RecursionError
    ):  # what runs the file says what is wrong with it
        for node in ast.walk(ast.parse(read_text(file, MOST_SOURCE_BYTES))):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module.split(".")[0]

"""Digest of a kernel's sources: its file in `nki_kernels`, and the files there that it imports, directly or not."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

_PACKAGE = "nki_kernels"


@cache
def hash_sources(kernel: str) -> str:
    """Return a digest of a kernel's sources, 32 hexadecimal digits.

    It depends only on the contents of the files and on their names within the package.

    Args:
        kernel: Name of the kernel's file in `nki_kernels`, without .py.
    """
    root = _find_root()
    sources: dict[str, bytes] = {}
    files = [root / f"{kernel}.py"]
    for file in files:
        name = file.relative_to(root).as_posix()
        if name not in sources:
            sources[name] = file.read_bytes()
            files += _find_imports(root, sources[name])
    text = b"".join(name.encode() + b"\0" + sources[name] + b"\0" for name in sorted(sources))
    return blake2b(text, digest_size=16).hexdigest()


def _find_root() -> Path:
    """Return the folder of the package `nki_kernels`."""
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def _find_imports(root: Path, source: bytes) -> Iterator[Path]:
    """Yield the files of the package that a source imports, also in imports inside of functions.

    Args:
        root: Folder of the package.
        source: Python source.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, *path = name.split(".")
            module = root.joinpath(*path)
            if package == _PACKAGE and path:
                files = (module.with_suffix(".py"), module / "__init__.py")
                yield from (file for file in files if file.is_file())

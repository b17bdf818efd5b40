"""What a kernel is made of: its file in `nki_kernels`, and the files there that this one imports."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

_PACKAGE = "nki_kernels"


@cache
def source_digest(kernel: str) -> str:
    """A digest of a kernel's sources; equal files give equal digests on every machine."""
    root = _root()
    found: dict[str, bytes] = {}
    waiting = [root / f"{kernel}.py"]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(root).as_posix()
        if name not in found:
            found[name] = file.read_bytes()
            waiting += _imported(root, found[name])
    text = b"".join(name.encode() + b"\0" + found[name] + b"\0" for name in sorted(found))
    return blake2b(text, digest_size=16).hexdigest()


def _root() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def _imported(root: Path, source: bytes) -> Iterator[Path]:
    """The files of the package that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            file = root.joinpath(*parts)
            if package == _PACKAGE and parts:
                yield from (
                    each for each in (file.with_suffix(".py"), file / "__init__.py") if each.is_file()
                )

"""Corrections, made at import, of mistakes in published files that keep a kernel from running."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from typing import Any

Repair = tuple[str, str]

LIBRARY: Mapping[str, Repair] = {
    # The docstring of `mlp` ends twice, which no Python parses; the first end goes.
    "nkilib_src.nkilib.core.mlp.mlp": (
        '        - Standard matrix multiplication layouts\n    """\n\n        TKG mode supports:',
        "        - Standard matrix multiplication layouts\n\n        TKG mode supports:",
    ),
}
"""Repairs of aws-neuron/nki-library. The key is a module; the value is text of its published file and the new text."""


class Repairing(importlib.abc.MetaPathFinder):
    """Import finder that replaces text in the source of some modules; the files on disk stay unchanged.

    `repairs` maps a module's full name to the text of the published file and its replacement. A file without that
    text is imported unchanged.
    """

    def __init__(self, repairs: Mapping[str, Repair]) -> None:
        self._repairs = repairs

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Return a spec whose loader applies the module's repair, or None for a module without one."""
        if name not in self._repairs:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Repaired(spec.loader.name, spec.loader.path, self._repairs[name])
        return spec


class _Repaired(importlib.machinery.SourceFileLoader):
    """Loader of a source file that replaces the text of a repair before compiling."""

    def __init__(self, name: str, path: str, repair: Repair) -> None:
        super().__init__(name, path)
        self._repair = repair

    def get_code(self, fullname: str) -> Any:
        """Return the code object of the module, compiled from its repaired source."""
        source = self.get_source(fullname)
        assert source is not None, f"{fullname} has a file"
        return compile(source.replace(*self._repair), self.get_filename(fullname), "exec")


def install(repairs: Mapping[str, Repair]) -> None:
    """Apply repairs to modules imported from now on in this process; modules already imported stay as they are."""
    sys.meta_path.insert(0, Repairing(repairs))

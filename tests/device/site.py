"""Folders that look as if packages of the vendor were installed in them; importing one of these raises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

NATIVE = {
    "nki": "0.7.0",
    "torch-neuronx": "2.14.0.3.0.1",
    "neuronx-cc": "2.28.1.0+0",
}
XLA = {
    "nki": "0.2.0",
    "torch-neuronx": "2.9.0.2.11.19912",
    "torch-xla": "2.9.0",
    "neuronx-cc": "2.22.12471.0+b4a00d10",
}
PLACEHOLDERS = {"nki": "0.0.1", "torch-neuronx": "1.0", "neuronx-cc": "1.0.post1"}


def install(folder: Path, versions: Mapping[str, str], patch: pytest.MonkeyPatch) -> None:
    """Put packages of these versions into a folder and the folder on the path."""
    folder.mkdir()
    for package, version in versions.items():
        name = package.replace("-", "_")
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} was executed')\n")
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    patch.syspath_prepend(str(folder))

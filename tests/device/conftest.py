"""Fixtures for tests of devices: cores that compute by the simulator and refuse what the vendor does not document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is an extra of development (dev)")

from tests.device import native, site, xla
from tests.device.core import Core
from tests.model.folders import write_folder

FRAMEWORKS: dict[str, tuple[Any, dict[str, str]]] = {
    "native": (native.installed, site.NATIVE),
    "xla": (xla.installed, site.XLA),
}


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Core]:
    """Return `on(framework, ranks=1)`, which installs a simulated core in this process.

    framework: "native" or "xla", through which the core is reached.
    """

    def installed(framework: str, ranks: int = 1) -> Core:
        make, versions = FRAMEWORKS[framework]
        site.install(tmp_path / "site", versions, monkeypatch)
        core: Core = make("trn2", ranks, monkeypatch)
        return core

    return installed


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Write a folder with a tiny Llama of random weights."""
    return write_folder(tmp_path / "model", seed=3)

"""Fixtures for tests of bundles: a bundle, and Python environments that have only a few packages."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nkw
import simulate
from simulate.bundle.blame import Comparison
from simulate.bundle.compare import compare_bundle
from simulate.cli import main

HERE = Path(__file__).parent
VENDOR = HERE / "vendor"
CASES = ("scaled", "shifted", "doubled", "picked")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle the package `travelling` for trn2 and return the bundle's folder, which no test writes to."""
    folder = tmp_path_factory.mktemp("bundles") / "travelling"
    before, variables = os.getcwd(), dict(os.environ)
    os.chdir(HERE)
    try:
        status = main(["bundle", "travelling", "--catalogue", "--target", "trn2", "--out", str(folder)])
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)
        for name in [module for module in sys.modules if module.partition(".")[0] == "travelling"]:
            del sys.modules[name]
    assert status == 0
    return folder


@pytest.fixture
def carried(bundle: Path, tmp_path: Path) -> Path:
    """Copy the bundle to a temporary folder, as it would be on an instance, and return the copy's folder."""
    return Path(shutil.copytree(bundle, tmp_path / "carried"))


def wheel(folder: Path, package: str, version: str, fault: dict[str, Any] | None = None) -> Path:
    """Build a wheel of a package in `vendor/`, with the stated faults written into it, and return its path."""
    files = {f"{package}/__init__.py": (VENDOR / package / "__init__.py").read_bytes()}
    if fault is not None:
        files[f"{package}/fault.json"] = json.dumps(fault).encode()
    info = f"{package}-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    rows = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]).encode()
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def bare_environment(folder: Path, built: Path, *packages: Path) -> Path:
    """Make an environment with a wheel and links to these packages, and no other package; return its Python."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    (site,) = folder.glob("lib/python3*/site-packages")
    for package in packages:
        for path in package.parent.glob(f"{package.name}*"):
            (site / path.name).symlink_to(path)
    with zipfile.ZipFile(built) as archive:  # what pip does with a wheel of Python files
        archive.extractall(site)
    return folder / "bin" / "python"


@dataclass
class Instance:
    """A machine with a Neuron SDK, as run.py sees it: Python interpreters, and command-line tools on its path."""

    python: Path
    nrtpy: Path
    tools: Path

    def run(self, folder: Path, *words: str, on_device: bool = False) -> subprocess.CompletedProcess[str]:
        """Run run.py of a bundle and return the finished process; with `on_device`, nrtpy takes the times."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("NKI", "NEURON", "PYTHON"))
        }
        kept["PATH"] = f"{self.tools}{os.pathsep}{kept['PATH']}"
        kept["HOME"] = str(self.tools)  # where no other environment lies
        quick = ["--warmup", "0", "--repetitions", "4" if on_device else "1"]
        quick += ["--nrtpy", str(self.nrtpy)] if on_device else []
        return subprocess.run(
            [str(self.python), str(folder / "run.py"), *quick, *words],
            env=kept,
            capture_output=True,
            text=True,
            cwd=folder.parent,
            check=False,
        )

    def tool(self, name: str, script: str) -> None:
        """Write an executable script with a name to a folder on the machine's path."""
        path = self.tools / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


@pytest.fixture
def instance(tmp_path: Path) -> Callable[..., Instance]:
    """Return a function that builds a machine from the version that its NKI claims and the faults that its NKI has."""

    def make(version: str = "0.7.0", **fault: Any) -> Instance:
        numpy = Path(np.__file__).parent
        packages = (numpy, Path(ml_dtypes.__file__).parent)
        folder = tmp_path / "instance"
        (folder / "tools").mkdir(parents=True)
        python = bare_environment(
            folder / "neuron",
            wheel(folder, "nki", version, fault),
            *packages,
            Path(simulate.__file__).parent,
            Path(nkw.__file__).parent,
        )
        nrtpy = bare_environment(folder / "nrtpy", wheel(folder, "nrtpy", "0.1.0"), *packages)
        return Instance(python, nrtpy, folder / "tools")

    return make


@pytest.fixture
def compared() -> Callable[[Path], Comparison]:
    """Return the function that compares a bundle with its result."""
    return compare_bundle

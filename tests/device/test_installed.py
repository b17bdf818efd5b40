"""Which of the vendor's packages are installed: told from metadata, while importing any of them would raise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from model.device.neuron.installed import Framework, installed_software, installed_version
from model.errors import ModelError
from simulate.doctor.command import find_problems
from simulate.doctor.machine import Package
from simulate.vendor_packages import FIRST_GENUINE
from tests.device import site
from tests.doctor.machines import LAPTOP, TRN1, with_packages


@pytest.mark.parametrize(
    ("versions", "framework"), [(site.NATIVE, Framework.native), (site.XLA, Framework.xla)]
)
def test_the_version_of_torch_neuronx_decides_and_nothing_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], framework: Framework
) -> None:
    site.install(tmp_path / "site", versions, monkeypatch)
    software = installed_software()
    assert software.framework is framework
    assert software.versions == {name: versions[name] for name in ("nki", "torch-neuronx", "neuronx-cc")}


@pytest.mark.parametrize(
    ("version", "framework"), [("2.9.1.2.11.0", Framework.xla), ("2.10.0.3.0", Framework.native)]
)
def test_pytorch_2_9_is_the_last_on_torch_xla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, framework: Framework
) -> None:
    site.install(tmp_path / "site", {**site.XLA, "torch-neuronx": version}, monkeypatch)
    assert installed_software().framework is framework


@pytest.mark.parametrize(
    ("version", "framework"), [("2.9.1.2.11.0", Framework.xla), ("2.10.0.3.0", Framework.native)]
)
def test_the_doctor_and_the_backend_tell_torchneuron_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, framework: Framework
) -> None:
    site.install(tmp_path / "site", {**site.XLA, "torch-neuronx": version}, monkeypatch)
    machine = with_packages(TRN1, torch_neuronx=version)
    told = "torchneuron-chip" in {problem.name for problem in find_problems(machine)}
    assert told == (installed_software().framework is Framework.native) == (framework is Framework.native)


@pytest.mark.parametrize("package", FIRST_GENUINE)
def test_the_doctor_and_the_backend_tell_placeholders_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    major, minor = FIRST_GENUINE[package]
    below = f"{major}.{minor - 1}" if minor else f"{major - 1}.99"
    for version, genuine in ((below, False), (f"{major}.{minor}.0", True)):
        site.install(tmp_path / version, {package: version}, monkeypatch)
        machine = with_packages(LAPTOP, **{package.replace("-", "_"): version})
        machine = replace(machine, packages={package: Package(version, 1)})
        assert machine.is_placeholder(package) is not genuine
        assert (installed_version(package) == version) is genuine


@pytest.mark.parametrize(
    ("versions", "missing"),
    [
        ({}, "nki, torch_neuronx, torch_xla"),
        (site.PLACEHOLDERS, "nki, torch_neuronx, torch_xla"),
        ({**site.XLA, "torch-neuronx": "1.0"}, "torch_neuronx"),
        ({name: site.XLA[name] for name in ("nki", "torch-neuronx")}, "torch_xla"),
        ({**site.NATIVE, "nki": "0.0.1"}, "nki"),
    ],
)
def test_what_is_missing_or_a_placeholder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], missing: str
) -> None:
    site.install(tmp_path / "site", versions, monkeypatch)
    with pytest.raises(ModelError, match=f"^the neuron backend needs {missing}, not installed here"):
        installed_software()

"""What doctor reads of a machine, from a folder that stands for its file system, and the command itself."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from simulate.cli import main
from simulate.doctor import collect as collecting
from simulate.doctor.collect import collect, run_command
from simulate.doctor.machine import Package
from tests.doctor.machines import neuron_ls


def written(root: Path, files: dict[str, str]) -> None:
    """Write files below a folder that stands for /."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    """Write the file system of an inf2.xlarge and return its root."""
    device = "/sys/devices/virtual/neuron_device/neuron0"
    written(
        tmp_path,
        {
            "/dev/neuron0": "not read",
            "/dev/null": "not noted",
            "/sys/module/neuron/version": "2.31.7.0\n",
            "/proc/modules": "neuron 503808 0 - Live 0x0\n",
            f"{device}/core_count": "2\n",
            f"{device}/info/architecture/instance_type": "Inf2\n",
            "/opt/aws/neuron/lib/libnrt.so.1": "not read",
        },
    )
    return tmp_path


def test_files_of_an_instance_are_read(instance: Path) -> None:
    machine = collect(instance, {}.get)
    assert machine.device_files == ["/dev/neuron0"]
    assert (machine.family, machine.cores, machine.driver) == ("inf2", 2, "2.31.7.0")
    assert machine.module_loaded
    assert machine.files["/opt/aws/neuron/lib/libnrt.so.1"] == ""


def test_neuron_ls_comes_before_the_files_of_the_driver(instance: Path) -> None:
    outputs = {"neuron-ls --json-output": neuron_ls(16, 4, 2)}
    machine = collect(instance, outputs.get)
    assert machine.cores == 64
    assert {device.lnc for device in machine.devices} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("lister", ["dpkg-query", "rpm"])
def test_system_packages_are_those_that_are_installed(tmp_path: Path, lister: str) -> None:
    def run(command: str) -> str | None:
        listed = "aws-neuronx-dkms 2.31.7.0 installed\naws-neuronx-tools 2.30 config-files\naws-neuronx-x\n"
        return listed if command.startswith(lister) else None

    assert dict(collect(tmp_path, run).system_packages) == {"aws-neuronx-dkms": "2.31.7.0"}


def test_an_empty_file_system_and_no_commands_are_a_machine_without_chips(tmp_path: Path) -> None:
    machine = collect(tmp_path, {}.get)
    assert (machine.device_files, machine.family, machine.cores, machine.driver) == ([], None, None, None)
    assert not machine.module_loaded


def test_packages_are_known_by_their_metadata_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(
        tmp_path,
        {
            "nki-0.0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: nki\nVersion: 0.0.1\n",
            "nki-0.0.1.dist-info/RECORD": "nki/__init__.py,,\nnki-0.0.1.dist-info/METADATA,,\n",
            "nki/__init__.py": "raise SystemExit('a placeholder was executed')\n",
            "nrtpy-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: nrtpy\n",
        },
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = collect(tmp_path, {}.get).packages
    assert packages["nki"] == Package("0.0.1", 1)
    assert "nrtpy" not in packages


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "proc" / "modules").mkdir(parents=True)
    assert "/proc/modules" not in collect(tmp_path, {}.get).files


def script(folder: Path, name: str, text: str) -> None:
    """Write a command in a folder."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_command_gives_its_output_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    script(tmp_path, "well", "echo $1")
    script(tmp_path, "ill", "echo half; exit 3")
    script(tmp_path, "stuck", "exec sleep 60")
    (tmp_path / "broken").write_bytes(b"\x7fELF")
    (tmp_path / "broken").chmod(0o755)
    assert run_command("well 'two words'") == "two words\n"
    assert run_command("ill") is None
    assert run_command("no-such-command") is None
    assert run_command("broken") is None
    monkeypatch.setattr(collecting, "_PATIENCE_SECONDS", 0.1)
    assert run_command("stuck") is None


@pytest.mark.slow
def test_the_command_says_what_to_mend_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-3")
    monkeypatch.delenv("NEURON_RT_NUM_CORES", raising=False)
    assert main(["doctor"]) == 0
    assert "to mend" not in capsys.readouterr().out
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith(
        "\nto mend: NEURON_RT_VISIBLE_CORES=0-3 names 4 cores and NEURON_RT_NUM_CORES=3 asks for 3; the runtime takes "
        "NEURON_RT_VISIBLE_CORES and ignores NEURON_RT_NUM_CORES\n  unset NEURON_RT_NUM_CORES\n"
        "  https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/guides/configuration-guide.html\n"
    )

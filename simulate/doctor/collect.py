"""Reads a machine: metadata of packages, a few files, the environment, and commands that list what there is."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from simulate.doctor.machine import (
    DRIVER_VERSION,
    MODINFO,
    MODULES,
    NEURON_LS,
    PRODUCT,
    RUNTIME_LIBRARY,
    TOOLS,
    Machine,
    Package,
)
from simulate.doctor.mends import OS_RELEASE
from simulate.vendor_packages import FIRST_GENUINE

_READ = (DRIVER_VERSION, MODULES, PRODUCT, OS_RELEASE)
_NOTED = (RUNTIME_LIBRARY, f"{TOOLS}/neuron-ls")
_DEVICE_FACTS = ("core_count", "info/architecture/instance_type")
_DPKG = "dpkg-query --show '--showformat=${Package} ${Version} ${db:Status-Status}\\n' 'aws-neuronx-*'"
_RPM = "rpm --query --all '--queryformat=%{NAME} %{VERSION} installed\\n' 'aws-neuronx-*'"
_PATIENCE_SECONDS = 10.0  # of each command; neuron-ls waits for a device that does not answer
_MOST_CHARACTERS = 1 << 20

Run = Callable[[str], "str | None"]


def collect(root: Path = Path("/"), run: Run | None = None) -> Machine:
    """What is known of this machine. `root` is the folder of its file system; `run` gives a command's stdout, or None.

    Nothing is imported and nothing is changed. A file that cannot be read and a command that is not there, fails, or
    takes longer than ten seconds are left out.
    """
    run = run or output
    variables = dict(os.environ)
    outputs = {command: text for command in (NEURON_LS, MODINFO) if (text := run(command)) is not None}
    return Machine(
        python=platform.python_version(),
        packages=dict(_packages()),
        system_packages=_system_packages(run),
        files=dict(_files(root)),
        variables=variables,
        outputs=outputs,
    )


def output(command: str) -> str | None:
    """The stdout of a command that lists something; None where it is not there, fails or does not end."""
    words = shlex.split(command)
    found = shutil.which(words[0]) or shutil.which(words[0], path=TOOLS)
    if found is None:
        return None
    try:
        ran = subprocess.run(
            [found, *words[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout[:_MOST_CHARACTERS].decode(errors="replace")


def _packages() -> Iterator[tuple[str, Package]]:
    for name in (*FIRST_GENUINE, "torch"):
        try:
            found = metadata.distribution(name)
            version = found.version
            code = [file for file in found.files or [] if file.suffix in (".py", ".so")]
        except (metadata.PackageNotFoundError, OSError, ValueError, KeyError):
            continue
        if isinstance(version, str):  # None where the metadata are damaged
            yield name, Package(version, len(code))


def _system_packages(run: Run) -> Mapping[str, str]:
    """The installed packages of the vendor, by the system's own list."""
    listed = f"{run(_DPKG) or ''}\n{run(_RPM) or ''}"
    rows = (line.split() for line in listed.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 3 and row[2] == "installed"}


def _files(root: Path) -> Iterator[tuple[str, str]]:
    devices = sorted((root / "sys/devices/virtual/neuron_device").glob("neuron*"))
    facts = [device / fact for device in devices for fact in _DEVICE_FACTS]
    for path in (*(root / each.lstrip("/") for each in _READ), *facts):
        try:
            with open(path, "rb") as file:
                yield _name(path, root), file.read(_MOST_CHARACTERS).decode(errors="replace")
        except OSError:
            continue
    noted = [root / each.lstrip("/") for each in _NOTED]
    for path in (*(root / "dev").glob("neuron*"), *(each for each in noted if each.exists())):
        yield _name(path, root), ""


def _name(path: Path, root: Path) -> str:
    return f"/{path.relative_to(root).as_posix()}"

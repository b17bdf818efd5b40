"""Collection of facts about a machine: package metadata, files, environment variables, outputs of listing commands."""

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
from simulate.doctor.repair_commands import OS_RELEASE
from simulate.vendor_packages import FIRST_GENUINE

_READ = (DRIVER_VERSION, MODULES, PRODUCT, OS_RELEASE)
_NOTED = (RUNTIME_LIBRARY, f"{TOOLS}/neuron-ls")
_DEVICE_FACTS = ("core_count", "info/architecture/instance_type")
_DPKG = "dpkg-query --show '--showformat=${Package} ${Version} ${db:Status-Status}\\n' 'aws-neuronx-*'"
_RPM = "rpm --query --all '--queryformat=%{NAME} %{VERSION} installed\\n' 'aws-neuronx-*'"
_PATIENCE_SECONDS = 10.0  # limit for each command; neuron-ls waits for devices that do not answer
_MOST_CHARACTERS = 1 << 20

Run = Callable[[str], "str | None"]


def collect(root: Path = Path("/"), run: Run | None = None) -> Machine:
    """Collect the facts about this machine.

    Imports and changes nothing. Unreadable files are left out, as are commands that are absent, fail, or
    exceed ten seconds.

    Args:
        root: Root folder of the file system, for files and devices. Python packages and environment variables are
            always those of this process.
        run: Runs a command line and returns its stdout, or None if it fails; by default `run_command`.
    """
    run = run or run_command
    variables = dict(os.environ)
    outputs = {command: text for command in (NEURON_LS, MODINFO) if (text := run(command)) is not None}
    return Machine(
        python=platform.python_version(),
        packages=dict(_read_packages()),
        system_packages=_list_system_packages(run),
        files=dict(_read_files(root)),
        variables=variables,
        outputs=outputs,
    )


def run_command(command: str) -> str | None:
    """Run a command line without a shell and return its stdout, at most 1 MiB.

    Returns None if the command is neither in PATH nor in the folder of Neuron's tools, fails, or takes over 10 seconds.
    """
    words = shlex.split(command)
    executable = shutil.which(words[0]) or shutil.which(words[0], path=TOOLS)
    if executable is None:
        return None
    try:
        process = subprocess.run(
            [executable, *words[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout[:_MOST_CHARACTERS].decode(errors="replace")


def _read_packages() -> Iterator[tuple[str, Package]]:
    """Yield (name, package) for every installed Python package of the vendor, and for torch, from their metadata."""
    for name in (*FIRST_GENUINE, "torch"):
        try:
            distribution = metadata.distribution(name)
            version = distribution.version
            code = [file for file in distribution.files or [] if file.suffix in (".py", ".so")]
        except (metadata.PackageNotFoundError, OSError, ValueError, KeyError):
            continue
        if isinstance(version, str):  # None if the metadata are damaged
            yield name, Package(version, len(code))


def _list_system_packages(run: Run) -> Mapping[str, str]:
    """Return the versions of the installed system packages aws-neuronx-*, by name, as dpkg and rpm list them."""
    listing = f"{run(_DPKG) or ''}\n{run(_RPM) or ''}"
    rows = (line.split() for line in listing.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 3 and row[2] == "installed"}


def _read_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (absolute name, text) of the files that describe the machine and can be read.

    Device files, the runtime library and neuron-ls have an empty text: only their existence matters.
    """
    devices = sorted((root / "sys/devices/virtual/neuron_device").glob("neuron*"))
    facts = [device / fact for device in devices for fact in _DEVICE_FACTS]
    for path in (*(root / name.lstrip("/") for name in _READ), *facts):
        try:
            with open(path, "rb") as file:
                yield _absolute_name(path, root), file.read(_MOST_CHARACTERS).decode(errors="replace")
        except OSError:
            continue
    checked_paths = [root / name.lstrip("/") for name in _NOTED]
    for path in (*(root / "dev").glob("neuron*"), *(path for path in checked_paths if path.exists())):
        yield _absolute_name(path, root), ""


def _absolute_name(path: Path, root: Path) -> str:
    """Return the name that a path below `root` would have if `root` were the root of the file system."""
    return f"/{path.relative_to(root).as_posix()}"

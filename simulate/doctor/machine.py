"""Facts about a machine: packages, files, environment variables and outputs of commands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from nkw.targets import GENERATIONS, TARGETS
from simulate.vendor_packages import Version, is_genuine, parse_version

DRIVER = "aws-neuronx-dkms"
RUNTIME = "aws-neuronx-runtime-lib"
COLLECTIVES = "aws-neuronx-collectives"
DRIVER_VERSION = "/sys/module/neuron/version"
"""File with the version of the loaded kernel module; absent while the module is not loaded."""
MODULES = "/proc/modules"
PRODUCT = "/sys/devices/virtual/dmi/id/product_name"
"""File with the instance type, on EC2."""
RUNTIME_LIBRARY = "/opt/aws/neuron/lib/libnrt.so.1"
TOOLS = "/opt/aws/neuron/bin"
NEURON_LS = "neuron-ls --json-output"
MODINFO = "modinfo -F version neuron"
LNC = "NEURON_LOGICAL_NC_CONFIG"
VIRTUAL = "NEURON_RT_VIRTUAL_CORE_SIZE"
_SYSFS = re.compile(
    r"/sys/devices/virtual/neuron_device/neuron\d+/(core_count|info/architecture/instance_type)"
)
_FAMILY = re.compile(r"(?i)(inf2|trn[123])")

_PLACEHOLDER_FILES = 3  # a placeholder has at most a few modules, which raise ImportError


class Package(NamedTuple):
    """An installed Python package: its version, and the number of its Python files and shared libraries."""

    version: str
    code_files: int


class Device(NamedTuple):
    """A chip as neuron-ls lists it: its cores, the physical cores of each, and the processes that use it."""

    cores: int
    lnc: int | None
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """Facts about a machine.

    `python` is the interpreter's version, `packages` are Python's, `system_packages` the versions of dpkg or
    rpm. `files` has the text of the files that exist, empty for a device or a library. `outputs` has the
    stdout of each command that succeeded.
    """

    python: str
    packages: Mapping[str, Package] = field(default_factory=lambda: MappingProxyType({}))
    system_packages: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    outputs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def device_files(self) -> list[str]:
        """Device files of the chips, in order of their numbers."""
        numbers = (re.fullmatch(r"/dev/neuron(\d+)", path) for path in self.files)
        return [f"/dev/neuron{number}" for number in sorted(int(match[1]) for match in numbers if match)]

    @property
    def module_loaded(self) -> bool:
        """Whether the kernel module `neuron` is loaded."""
        return DRIVER_VERSION in self.files or any(
            line.startswith("neuron ") for line in self.files.get(MODULES, "").splitlines()
        )

    @property
    def driver(self) -> str | None:
        """Version of the driver: of the loaded module, else of the installed package."""
        versions = (
            self.files.get(DRIVER_VERSION),
            self.outputs.get(MODINFO),
            self.system_packages.get(DRIVER),
        )
        return next((version.strip() for version in versions if version and version.strip()), None)

    @property
    def runtime(self) -> str | None:
        """Version of the runtime library that is installed as a package."""
        return self.system_packages.get(RUNTIME)

    @property
    def family(self) -> str | None:
        """Instance family, which is a target of the simulator; None elsewhere, or if unknown."""
        texts = [text for path, text in sorted(self.files.items()) if _SYSFS.fullmatch(path)]
        for text in (*texts, self.files.get(PRODUCT, "")):
            match = _FAMILY.match(text.strip())
            if match:
                return match[1].lower()
        return None

    @property
    def devices(self) -> list[Device]:
        """Chips as neuron-ls lists them, else as the driver's files do; empty if neither is known."""
        listed_devices = _parse_devices(self.outputs.get(NEURON_LS, ""))
        if listed_devices:
            return listed_devices
        counts = (
            text for path, text in self.files.items() if _SYSFS.fullmatch(path) and path.endswith("count")
        )
        return [Device(int(count), None, ()) for count in counts if re.fullmatch(r"\s*\d{1,5}\s*", count)]

    @property
    def lnc_setting(self) -> str | None:
        """Number of physical cores of a logical core, as the runtime's variables set it."""
        return self.variables.get(LNC) or self.variables.get(VIRTUAL)

    @property
    def cores(self) -> int | None:
        """Number of cores that a process can request from the runtime; None if unknown.

        neuron-ls counts logical cores of its current LNC degree. The driver's files do not state the degree,
        which matters from Trn2 on.
        """
        devices, lnc = self.devices, self.lnc_setting
        if any(device.lnc is None for device in devices) and find_generation(self.family or "") != "trn1":
            return None
        physical = sum(device.cores * (device.lnc or 1) for device in devices)
        return (
            physical // int(lnc) if lnc in ("1", "2") else sum(device.cores for device in devices)
        ) or None

    def version(self, package: str) -> Version | None:
        """Return the first two numbers of a Python package's version; None if it is absent or a placeholder."""
        package_record = self.packages.get(package)
        return (
            None
            if package_record is None or self.is_placeholder(package)
            else parse_version(package_record.version)
        )

    def is_placeholder(self, package: str) -> bool:
        """Return whether a package is the public index's placeholder for one of the vendor's packages."""
        package_record = self.packages.get(package)
        has_few_files = package_record is not None and package_record.code_files <= _PLACEHOLDER_FILES
        return (
            package_record is not None and has_few_files and not is_genuine(package, package_record.version)
        )


def format_version(version: Version) -> str:
    """Format a version, such as 2.33.1."""
    return ".".join(map(str, version))


def format_chip_count(chips: Sequence[object]) -> str:
    """Format a number of chips with its noun."""
    return f"{len(chips)} chip{'' if len(chips) == 1 else 's'}"


def find_generation(target: str) -> str | None:
    """Return the target that represents the generation of a target or of an instance family; None if unknown.

    trn1n has the chips of trn1, and those of inf2 have the same generation: a NEFF compiled for one
    architecture does not load on another (page "nrtpy troubleshooting").
    """
    name = {"trn1n": "trn1", "inf2": "trn1", **GENERATIONS}.get(target, target)
    return name if name in TARGETS else None


def _parse_devices(text: str) -> list[Device]:
    """Parse the output of `neuron-ls --json-output` (Neuron LS user guide); empty for text of another form."""
    try:
        rows: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(rows, list):
        return []
    return [device for device in map(_parse_device, rows) if device is not None]


def _parse_device(row: Any) -> Device | None:
    """Parse a chip of `neuron-ls`; None if its number of cores is missing."""
    cores = row.get("nc_count") if isinstance(row, dict) else None
    if type(cores) is not int or cores < 1:
        return None
    lnc, holders = row.get("logical_neuroncore_config"), row.get("neuron_processes")
    processes = (
        [process for process in holders if isinstance(process, dict)] if isinstance(holders, list) else []
    )
    return Device(
        cores,
        lnc if type(lnc) is int else None,
        tuple(f"{process.get('pid')} ({process.get('command')!s:.40})" for process in processes),
    )

"""Facts about a machine: packages, files, environment variables and outputs of commands.

`simulate.doctor.collect` reads them once; findings look at this record alone, so that tests can make machines. The LNC
degree (logical NeuronCore configuration) is the number of physical cores that form one logical core.
"""

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
    """A chip: its number of logical cores, the physical cores of each, and the processes that use it.

    If the driver's files are the source instead of neuron-ls, `cores` counts what they count, `lnc` is None, and
    `holders` is empty. A holder is a text with process id and command.
    """

    cores: int
    lnc: int | None
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """Facts about a machine.

    `python` is the interpreter's version. `packages` are the vendor's installed Python packages and torch, by name.
    `system_packages` has the versions that dpkg or rpm list, by name. `files` has, by absolute name, the text of the
    files that exist, empty for a device or a library. `variables` are environment variables. `outputs` has the stdout
    of each command that succeeded, by command line.
    """

    python: str
    packages: Mapping[str, Package] = field(default_factory=lambda: MappingProxyType({}))
    system_packages: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    outputs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def device_files(self) -> list[str]:
        """Names of the device files of the chips, such as /dev/neuron0, in order of their numbers."""
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
        """Version of the driver: of the loaded module, else of the installed module or package; None without one."""
        versions = (
            self.files.get(DRIVER_VERSION),
            self.outputs.get(MODINFO),
            self.system_packages.get(DRIVER),
        )
        return next((version.strip() for version in versions if version and version.strip()), None)

    @property
    def runtime(self) -> str | None:
        """Version of the runtime library that is installed as a system package; None if there is none."""
        return self.system_packages.get(RUNTIME)

    @property
    def family(self) -> str | None:
        """Instance family, such as inf2 or trn2, from the driver or from EC2; None on other machines, or if unknown."""
        texts = [text for path, text in sorted(self.files.items()) if _SYSFS.fullmatch(path)]
        for text in (*texts, self.files.get(PRODUCT, "")):
            match = _FAMILY.match(text.strip())
            if match:
                return match[1].lower()
        return None

    @property
    def devices(self) -> list[Device]:
        """Chips as neuron-ls lists them, else as the driver's files do; empty if neither exists."""
        listed_devices = _parse_devices(self.outputs.get(NEURON_LS, ""))
        if listed_devices:
            return listed_devices
        counts = (
            text for path, text in self.files.items() if _SYSFS.fullmatch(path) and path.endswith("count")
        )
        return [Device(int(count), None, ()) for count in counts if re.fullmatch(r"\s*\d{1,5}\s*", count)]

    @property
    def lnc_setting(self) -> str | None:
        """LNC degree that the runtime's environment variables set, as text and unchecked; None if neither is set."""
        return self.variables.get(LNC) or self.variables.get(VIRTUAL)

    @property
    def cores(self) -> int | None:
        """Number of logical cores of all chips that a process can request from the runtime; None if unknown.

        It is counted by the LNC degree of the environment variables, else by that of neuron-ls. The driver's files do
        not state the degree, so the number is unknown without neuron-ls from Trn2 on.
        """
        devices, lnc = self.devices, self.lnc_setting
        if any(device.lnc is None for device in devices) and find_generation(self.family or "") != "trn1":
            return None
        physical = sum(device.cores * (device.lnc or 1) for device in devices)
        return (
            physical // int(lnc) if lnc in ("1", "2") else sum(device.cores for device in devices)
        ) or None

    def version(self, package: str) -> Version | None:
        """Return the first two numbers of a Python package's version, such as (2, 21) for 2.21.33; as ints.

        None if the package is not installed, or if it is a placeholder.
        """
        package_record = self.packages.get(package)
        return (
            None
            if package_record is None or self.is_placeholder(package)
            else parse_version(package_record.version)
        )

    def is_placeholder(self, package: str) -> bool:
        """Return whether an installed package is only the placeholder that the public index has under its name.

        A placeholder has at most three code files and a version before the vendor's first; False if absent.
        """
        package_record = self.packages.get(package)
        has_few_files = package_record is not None and package_record.code_files <= _PLACEHOLDER_FILES
        return (
            package_record is not None and has_few_files and not is_genuine(package, package_record.version)
        )


def format_version(version: Version) -> str:
    """Format a version, such as (2, 33), with dots."""
    return ".".join(map(str, version))


def format_chip_count(chips: Sequence[object]) -> str:
    """Format the number of elements of `chips` with its noun, such as "1 chip" or "16 chips"."""
    return f"{len(chips)} chip{'' if len(chips) == 1 else 's'}"


def find_generation(target: str) -> str | None:
    """Return the target whose compiled kernels load on a chip or instance family: trn1, trn2 or trn3; None if unknown.

    trn1n has the chips of trn1, and the chips of inf2 are of the same generation. A NEFF compiled for one architecture
    does not load on another (page "nrtpy troubleshooting").

    Args:
        target: A chip, a generation such as gen3, or an instance family.
    """
    name = {"trn1n": "trn1", "inf2": "trn1", **GENERATIONS}.get(target, target)
    return name if name in TARGETS else None


def _parse_devices(text: str) -> list[Device]:
    """Parse the chips in the output of `neuron-ls --json-output` (Neuron LS user guide).

    Empty for text of another form; chips without a number of cores are left out.
    """
    try:
        rows: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(rows, list):
        return []
    return [device for device in map(_parse_device, rows) if device is not None]


def _parse_device(row: Any) -> Device | None:
    """Parse one chip of `neuron-ls`, read from JSON; None if its number of cores is missing or not positive."""
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

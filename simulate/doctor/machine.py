"""What `doctor` knows of a machine: packages, files, environment variables and the outputs of commands, as data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from nkw.targets import GENERATIONS, TARGETS
from simulate.vendor_packages import Version, is_genuine, numbers

DRIVER = "aws-neuronx-dkms"
RUNTIME = "aws-neuronx-runtime-lib"
COLLECTIVES = "aws-neuronx-collectives"
DRIVER_VERSION = "/sys/module/neuron/version"
"""The version of the kernel module that runs; there while the module is loaded."""
MODULES = "/proc/modules"
PRODUCT = "/sys/devices/virtual/dmi/id/product_name"
"""The instance type, on EC2."""
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

_PLACEHOLDER_FILES = 3  # a placeholder is at most a module or two that raise ImportError


class Package(NamedTuple):
    """An installed Python package: its version, and how many of its files are Python or shared libraries."""

    version: str
    code_files: int


class Device(NamedTuple):
    """A chip as neuron-ls lists it: its cores, how many physical ones make each of them, who holds them."""

    cores: int
    lnc: int | None
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """One machine. Nothing in it was executed but the commands of `outputs`, which only list what there is.

    `python` is the interpreter's version, `packages` are Python's, `system_packages` those of dpkg or rpm with their
    versions. `files` has the text of those files that are there, empty for a device or a library. `outputs` has
    the stdout of each command that ended without an error.
    """

    python: str
    packages: Mapping[str, Package] = field(default_factory=lambda: MappingProxyType({}))
    system_packages: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    outputs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def device_files(self) -> list[str]:
        """The device files of the chips, in the order of their numbers."""
        numbers = (re.fullmatch(r"/dev/neuron(\d+)", path) for path in self.files)
        return [f"/dev/neuron{number}" for number in sorted(int(each[1]) for each in numbers if each)]

    @property
    def module_loaded(self) -> bool:
        """Whether the kernel module `neuron` is loaded."""
        return DRIVER_VERSION in self.files or any(
            line.startswith("neuron ") for line in self.files.get(MODULES, "").splitlines()
        )

    @property
    def driver(self) -> str | None:
        """The version of the driver: of the loaded module, else of the installed one."""
        known = (self.files.get(DRIVER_VERSION), self.outputs.get(MODINFO), self.system_packages.get(DRIVER))
        return next((each.strip() for each in known if each and each.strip()), None)

    @property
    def runtime(self) -> str | None:
        """The version of the runtime library that is installed as a package."""
        return self.system_packages.get(RUNTIME)

    @property
    def family(self) -> str | None:
        """The instance family, one of the simulator's targets; None where this is no such instance, or unknown."""
        told = [text for path, text in sorted(self.files.items()) if _SYSFS.fullmatch(path)]
        for text in (*told, self.files.get(PRODUCT, "")):
            found = _FAMILY.match(text.strip())
            if found:
                return found[1].lower()
        return None

    @property
    def devices(self) -> list[Device]:
        """The chips as neuron-ls lists them, else as the driver's files do; empty where neither is known."""
        listed = _listed(self.outputs.get(NEURON_LS, ""))
        if listed:
            return listed
        counts = (
            text for path, text in self.files.items() if _SYSFS.fullmatch(path) and path.endswith("count")
        )
        return [Device(int(each), None, ()) for each in counts if re.fullmatch(r"\s*\d{1,5}\s*", each)]

    @property
    def lnc_asked(self) -> str | None:
        """The number of physical cores of a logical one, as the variables of the runtime give it."""
        return self.variables.get(LNC) or self.variables.get(VIRTUAL)

    @property
    def cores(self) -> int | None:
        """How many cores a process can ask the runtime for; None where unknown.

        neuron-ls counts logical cores of its own LNC degree. The driver's files do not say which they count, which
        matters from Trn2 on.
        """
        devices, asked = self.devices, self.lnc_asked
        if any(each.lnc is None for each in devices) and generation(self.family or "") != "trn1":
            return None
        physical = sum(each.cores * (each.lnc or 1) for each in devices)
        return (
            physical // int(asked) if asked in ("1", "2") else sum(each.cores for each in devices)
        ) or None

    def version(self, package: str) -> Version | None:
        """The first two numbers of a Python package's version; None where it is absent or a placeholder."""
        found = self.packages.get(package)
        return None if found is None or self.is_placeholder(package) else numbers(found.version)

    def is_placeholder(self, package: str) -> bool:
        """Whether a package is the public index's placeholder for one of the vendor's."""
        found = self.packages.get(package)
        few = found is not None and found.code_files <= _PLACEHOLDER_FILES
        return found is not None and few and not is_genuine(package, found.version)


def dotted(version: Version) -> str:
    """The version as text, such as 2.33.1."""
    return ".".join(map(str, version))


def counted(chips: Sequence[object]) -> str:
    """How many chips there are, in words."""
    return f"{len(chips)} chip{'' if len(chips) == 1 else 's'}"


def generation(target: str) -> str | None:
    """The chip that stands for the generation of a target or of an instance family; None for an unknown name.

    trn1n has trn1's chips, and inf2's belong to the same generation: what is compiled for one architecture does not
    load on another (page "nrtpy troubleshooting").
    """
    name = {"trn1n": "trn1", "inf2": "trn1", **GENERATIONS}.get(target, target)
    return name if name in TARGETS else None


def _listed(text: str) -> list[Device]:
    """What `neuron-ls --json-output` prints (Neuron LS user guide); empty for anything else."""
    try:
        rows: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(rows, list):
        return []
    return [each for each in map(_device, rows) if each is not None]


def _device(row: Any) -> Device | None:
    cores = row.get("nc_count") if isinstance(row, dict) else None
    if type(cores) is not int or cores < 1:
        return None
    lnc, holders = row.get("logical_neuroncore_config"), row.get("neuron_processes")
    processes = [each for each in holders if isinstance(each, dict)] if isinstance(holders, list) else []
    return Device(
        cores,
        lnc if type(lnc) is int else None,
        tuple(f"{each.get('pid')} ({each.get('command')!s:.40})" for each in processes),
    )

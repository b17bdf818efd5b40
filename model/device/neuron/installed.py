"""Which of AWS Neuron's packages are installed, told from their metadata: nothing of them is executed.

Two products share the name torch-neuronx: what is built on torch_xla, and TorchNeuron. The version tells them apart,
and placeholders of the public index from the vendor's packages (`simulate.vendor_packages`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import metadata

from model.device.binding import neuron_package_installed
from model.errors import ModelError
from simulate.vendor_packages import FIRST_TORCHNEURON, is_genuine, numbers

_REPOSITORY = "AWS Neuron's package repository"


class Framework(Enum):
    """How tensors and kernels reach a NeuronCore."""

    native = "TorchNeuron"
    xla = "torch-neuronx on torch_xla"


@dataclass(frozen=True)
class Software:
    """What is installed: the framework, and the versions of the packages that decide what a kernel is compiled to."""

    framework: Framework
    versions: Mapping[str, str]


def installed_software() -> Software:
    """What is installed. ModelError that names each missing package."""
    versions = {name: installed_version(name) for name in ("nki", "torch-neuronx", "neuronx-cc")}
    torch_neuronx = versions["torch-neuronx"]
    native = torch_neuronx is not None and numbers(torch_neuronx) >= FIRST_TORCHNEURON
    needed = ["torch", "torch_neuronx"] if native else ["torch", "torch_neuronx", "torch_xla"]
    missing = [] if neuron_package_installed() else ["nki"]
    missing += [name for name in needed if not _is_there(name)]
    if missing:
        raise ModelError(
            f"the neuron backend needs {', '.join(missing)}, not installed here: on a Trainium or Inferentia "
            f"instance run pip install 'nki-workbench[neuron]' with {_REPOSITORY} configured"
        )
    found = {name: version for name, version in versions.items() if version is not None}
    return Software(Framework.native if native else Framework.xla, found)


def _is_there(module: str) -> bool:
    """Whether a module is installed, and not a placeholder of its name."""
    if module == "torch_neuronx" and installed_version("torch-neuronx") is None:
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module in sys.modules without a spec
        return False


def installed_version(package: str) -> str | None:
    """The version of a package, None where none or a placeholder is installed."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    return version if is_genuine(package, version) else None

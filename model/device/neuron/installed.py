"""Which of AWS Neuron's packages are installed, told from their metadata: nothing of them is executed.

Two products share the name torch-neuronx. Up to PyTorch 2.9 it is built on torch_xla, from 2.10 on it is TorchNeuron, a
native backend of PyTorch for Trn2 and Trn3:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/frameworks/torch/about/index.html
The public index carries placeholders under these names. Versions below those of `_FIRST` are such.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import metadata

from model.device.binding import neuron_package_installed
from model.errors import ModelError

_FIRST = {
    "torch-neuronx": (2, 1),
    "neuronx-cc": (2, 12),
    "transformers-neuronx": (0, 4),
    "neuronx-distributed-inference": (0, 2),
}
"""Of the vendor's own packages. The placeholders of the public index are torch-neuronx 1.0, neuronx-cc 1.0 and
transformers-neuronx 0.1."""
_FIRST_NATIVE = (2, 10)
_REPOSITORY = "AWS Neuron's package repository"


class Route(Enum):
    """How tensors and kernels reach a NeuronCore."""

    native = "TorchNeuron"
    xla = "torch-neuronx on torch_xla"


@dataclass(frozen=True)
class Software:
    """What is installed: the route, and the versions of the packages that decide what a kernel is compiled to."""

    route: Route
    versions: Mapping[str, str]


def installed_software() -> Software:
    """What is installed. ModelError that names each missing package."""
    versions = {name: installed_version(name) for name in ("nki", "torch-neuronx", "neuronx-cc")}
    torch_neuronx = versions["torch-neuronx"]
    native = torch_neuronx is not None and _numbers(torch_neuronx) >= _FIRST_NATIVE
    needed = ["torch", "torch_neuronx"] if native else ["torch", "torch_neuronx", "torch_xla"]
    missing = [] if neuron_package_installed() else ["nki"]
    missing += [name for name in needed if not _is_there(name)]
    if missing:
        raise ModelError(
            f"the neuron backend needs {', '.join(missing)}, not installed here: on a Trainium or Inferentia "
            f"instance run pip install 'nki-workbench[neuron]' with {_REPOSITORY} configured"
        )
    found = {name: version for name, version in versions.items() if version is not None}
    return Software(Route.native if native else Route.xla, found)


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
    return version if _numbers(version) >= _FIRST.get(package, (0, 2)) else None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:2] if part.isdigit())

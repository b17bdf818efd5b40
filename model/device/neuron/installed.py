"""Detection of AWS Neuron's packages from their metadata; no code of them is executed.

Two products share the name torch-neuronx: one on torch_xla, and TorchNeuron. The version distinguishes them, and it
distinguishes the vendor's packages from placeholders of the public index (`simulate.vendor_packages`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import metadata

from model.errors import ModelError
from simulate.bind import has_real_package
from simulate.vendor_packages import FIRST_TORCHNEURON, is_genuine, parse_version

_REPOSITORY = "AWS Neuron's package repository"


class Framework(Enum):
    """Framework through which tensors and kernels reach a NeuronCore."""

    native = "TorchNeuron"
    xla = "torch-neuronx on torch_xla"


@dataclass(frozen=True)
class Software:
    """Installed framework, and the versions by package of everything that affects compiled kernels."""

    framework: Framework
    versions: Mapping[str, str]


def installed_software() -> Software:
    """Return the installed framework, and the versions of nki, torch-neuronx and neuronx-cc that are installed.

    Raises:
        ModelError: Packages are missing; the message names them all.
    """
    versions = {name: installed_version(name) for name in ("nki", "torch-neuronx", "neuronx-cc")}
    torch_neuronx = versions["torch-neuronx"]
    is_native = torch_neuronx is not None and parse_version(torch_neuronx) >= FIRST_TORCHNEURON
    needed = ["torch", "torch_neuronx"] if is_native else ["torch", "torch_neuronx", "torch_xla"]
    missing = [] if has_real_package() else ["nki"]
    missing += [name for name in needed if not _is_installed(name)]
    if missing:
        raise ModelError(
            f"the neuron backend needs {', '.join(missing)}, not installed here: on a Trainium or Inferentia "
            f"instance run pip install 'nki-workbench[neuron]' with {_REPOSITORY} configured"
        )
    installed = {name: version for name, version in versions.items() if version is not None}
    return Software(Framework.native if is_native else Framework.xla, installed)


def _is_installed(module: str) -> bool:
    """Return whether a Python module is installed; False for a placeholder of torch_neuronx."""
    if module == "torch_neuronx" and installed_version("torch-neuronx") is None:
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module in sys.modules without a spec
        return False


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed or is a placeholder of the public index."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    return version if is_genuine(package, version) else None

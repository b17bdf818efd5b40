"""The vendor's Python packages: the versions from which on each is genuine.

The public index has placeholders of the same names with lower versions, whose import fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

Version = tuple[int, ...]

FIRST_GENUINE: Mapping[str, Version] = MappingProxyType(
    {
        "nki": (0, 1),
        "neuronx-cc": (2, 0),
        "torch-neuronx": (1, 11),
        "libneuronxla": (2, 0),
        "transformers-neuronx": (0, 2),
        "neuronx-distributed": (0, 2),
        "neuronx-distributed-inference": (0, 2),
        "nrtpy": (2, 0),
        "vllm-neuron": (0, 2),
        "nki-library": (1, 0),
    }
)
"""Each version is above those of all placeholders, such as nki 0.0.1, torch-neuronx 1.0, neuronx-cc 1.0 and
transformers-neuronx 0.1."""

FIRST_NKI: Version = (0, 2)
"""Of nki: the oldest level that is known here (`simulate.level`). 0.1, of SDK 2.27, is not used."""

FIRST_TORCHNEURON: Version = (2, 10)
"""Of torch-neuronx: up to PyTorch 2.9 it is built on torch_xla, from 2.10 on it is TorchNeuron, a native backend of
PyTorch for Trn2 and Trn3:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/frameworks/torch/about/index.html"""


def parse_version(version: str) -> Version:
    """Return the first two numbers of a version, such as (2, 31) for 2.31.7.0; an empty tuple if it has none."""
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version.split("+")[0])[:2])


def is_genuine(package: str, version: str) -> bool:
    """Return whether a version of a package is no placeholder's; True for packages that have no placeholder."""
    return parse_version(version) >= FIRST_GENUINE.get(package, ())

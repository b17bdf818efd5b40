"""Ranks on NeuronCores, through what is installed of AWS Neuron: TorchNeuron, or torch-neuronx on torch_xla.

Written to the vendor's documentation, which each file cites. It has not run on a chip.
"""

from __future__ import annotations

from model.device.neuron.device import NeuronDevice, cache_variables
from model.device.neuron.installed import Framework, Software, installed_software, installed_version

__all__ = [
    "Framework",
    "NeuronDevice",
    "Software",
    "cache_variables",
    "installed_software",
    "installed_version",
]

"""Ranks on NeuronCores through TorchNeuron or through torch-neuronx on torch_xla, whichever is installed.

The code follows the documentation of AWS Neuron, which every file cites. It has not run on a chip.
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

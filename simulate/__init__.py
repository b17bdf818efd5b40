"""A simulator of NeuronCores that runs, checks and times NKI kernels on any machine."""

from __future__ import annotations

from simulate.bind import install
from simulate.errors import NkwError
from simulate.hardware import TARGETS, Hardware, hardware
from simulate.run import Launch, Mode, World, launch, recorded, target_hardware

__version__ = "0.1.0"

__all__ = [
    "TARGETS",
    "Hardware",
    "Launch",
    "Mode",
    "NkwError",
    "World",
    "hardware",
    "install",
    "launch",
    "recorded",
    "target_hardware",
]

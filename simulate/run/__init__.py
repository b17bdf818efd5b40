"""Running kernels: issue, stream, turns, meetings, launch."""

from simulate.run.kernel import Kernel, as_kernel
from simulate.run.launch import Launch, World, launch, recorded, target_hardware
from simulate.run.machine import Mode, current_core
from simulate.run.stream import Event, NkiInstruction, Stream

__all__ = [
    "Event",
    "Kernel",
    "Launch",
    "Mode",
    "NkiInstruction",
    "Stream",
    "World",
    "as_kernel",
    "current_core",
    "launch",
    "recorded",
    "target_hardware",
]

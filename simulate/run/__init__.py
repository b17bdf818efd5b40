"""Running kernels: issue, stream, turns, meetings, launch."""

from simulate.run.kernel import Kernel, as_kernel
from simulate.run.launch import Launch, recorded
from simulate.run.machine import Mode, current_core
from simulate.run.options import ReplayOptions
from simulate.run.replay import REPLAYS, ReplayReport
from simulate.run.stream import Event, NkiInstruction, Stream
from simulate.run.target import target_hardware
from simulate.run.verify import ReplayMismatch
from simulate.run.world import World, launch

__all__ = [
    "REPLAYS",
    "Event",
    "Kernel",
    "Launch",
    "Mode",
    "NkiInstruction",
    "ReplayMismatch",
    "ReplayOptions",
    "ReplayReport",
    "Stream",
    "World",
    "as_kernel",
    "current_core",
    "launch",
    "recorded",
    "target_hardware",
]

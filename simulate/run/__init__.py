"""Execution of kernels: launches, issue of instructions, instruction streams, the core scheduler and rendezvous."""

from simulate.run.environment import target_hardware
from simulate.run.launch import Launch
from simulate.run.launch_text import report as report_of_launch
from simulate.run.machine import Mode, current_core, running_level
from simulate.run.observers import recorded
from simulate.run.stream import Event, NkiInstruction, Stream

__all__ = [
    "Event",
    "Launch",
    "Mode",
    "NkiInstruction",
    "Stream",
    "current_core",
    "recorded",
    "report_of_launch",
    "running_level",
    "target_hardware",
]

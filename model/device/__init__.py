"""Devices that run kernels: simulated ranks, ranks that only plan, or a NeuronCore.

No other package of the model imports the simulator.
"""

from __future__ import annotations

from model.device.chips import (
    can_divide_among,
    chip,
    choose_lnc,
    compute_collective_ns,
    find_instance,
    find_sorted_expert_width,
    limit_lnc,
    list_kernel_parameters,
    read_lnc,
    use_overlay,
)
from model.device.dry import DryDevice
from model.device.files import write_page, write_passes
from model.device.pipeline import PipelinedPass, Schedule, schedule_stages
from model.device.prediction import KernelTime, Pass, Prediction
from model.device.refusals import ArrayShape, find_refusal
from model.device.simulated import SimulatedDevice, read_process_rank
from simulate.hardware import INSTANCES, Hardware, Instance
from simulate.profile.page import read_style as page_style

__all__ = [
    "INSTANCES",
    "ArrayShape",
    "DryDevice",
    "Hardware",
    "Instance",
    "KernelTime",
    "Pass",
    "PipelinedPass",
    "Prediction",
    "Schedule",
    "SimulatedDevice",
    "can_divide_among",
    "chip",
    "choose_lnc",
    "compute_collective_ns",
    "find_instance",
    "find_refusal",
    "find_sorted_expert_width",
    "limit_lnc",
    "list_kernel_parameters",
    "page_style",
    "read_lnc",
    "read_process_rank",
    "schedule_stages",
    "use_overlay",
    "write_page",
    "write_passes",
]

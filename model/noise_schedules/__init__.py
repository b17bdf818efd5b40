"""Noise schedules of diffusion models in numpy, read from the scheduler_config.json of a diffusers folder.

`read_schedule` returns the `NoiseSchedule` of a configuration; `schedule.py` describes its use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model.errors import ModelError
from model.noise_schedules.ddim import read_ddim
from model.noise_schedules.ddpm import read_ddpm
from model.noise_schedules.dpm_solver import read_dpm_solver
from model.noise_schedules.euler import read_euler
from model.noise_schedules.euler_ancestral import read_euler_ancestral
from model.noise_schedules.fields import CODE, ScheduleFields
from model.noise_schedules.flow_euler import read_flow_euler
from model.noise_schedules.flow_heun import read_flow_heun
from model.noise_schedules.heun import read_heun
from model.noise_schedules.schedule import NoiseSchedule, State, Trajectory

__all__ = ["SCHEDULES", "NoiseSchedule", "State", "Trajectory", "read_schedule"]

SCHEDULES: dict[str, Callable[[ScheduleFields], NoiseSchedule]] = {
    "DDPMScheduler": read_ddpm,
    "DDIMScheduler": read_ddim,
    "EulerDiscreteScheduler": read_euler,
    "EulerAncestralDiscreteScheduler": read_euler_ancestral,
    "HeunDiscreteScheduler": read_heun,
    "DPMSolverMultistepScheduler": read_dpm_solver,
    "FlowMatchEulerDiscreteScheduler": read_flow_euler,
    "FlowMatchHeunDiscreteScheduler": read_flow_heun,
}
"""Reader of each diffusers class, by the name in the field `_class_name`."""


def read_schedule(config: dict[str, Any]) -> NoiseSchedule:
    """Return the schedule of a scheduler_config.json. Every field is obeyed, or refused by name.

    Raises:
        ModelError: The configuration is no object, its class is not in `SCHEDULES`, or a field is unknown, has the
            wrong type or range, or contradicts another.
    """
    if not isinstance(config, dict):
        raise ModelError(f"the scheduler configuration is a {type(config).__name__}, not an object", CODE)
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ModelError(
            f"_class_name {name!r:.60} is not supported; use one of {', '.join(SCHEDULES)}", CODE
        )
    fields = ScheduleFields(config)
    schedule = SCHEDULES[name](fields)
    fields.check_all_read()
    return schedule

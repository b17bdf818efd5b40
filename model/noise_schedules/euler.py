"""Euler's method along the noise levels (Karras et al., arXiv 2206.00364), as EulerDiscreteScheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from model.noise_schedules.exploding import ZERO_SNR_ALPHA, ExplodingSchedule
from model.noise_schedules.fields import ScheduleFields
from model.noise_schedules.predictions import DIFFUSION_PREDICTIONS, Prediction
from model.noise_schedules.spacing import (
    FinalSigma,
    SigmaSpacing,
    find_timesteps,
    read_sigma_spacing,
    space_sigmas,
)
from model.noise_schedules.training import interpolate_linearly, read_training

SIGMA_LIMITS = (1e-6, 1e6)
"""Limits of sigma_min and sigma_max, whose squares must be float32 numbers."""


class Interpolation(Enum):
    """Noise levels from the timesteps, or evenly spaced logarithms from the highest to the lowest of training."""

    LINEAR = "linear"
    LOG_LINEAR = "log_linear"


class TimestepType(Enum):
    """Timestep that the model receives; CONTINUOUS is log(sigma) / 4 for models that predict v."""

    DISCRETE = "discrete"
    CONTINUOUS = "continuous"


@dataclass(frozen=True, eq=False)
class EulerSchedule(ExplodingSchedule):
    """Euler's method with its configuration.

    sigma_min, sigma_max  ends of Karras and exponential noise levels; None for those of the timesteps
    """

    sigma_spacing: SigmaSpacing = SigmaSpacing.TIMESTEPS
    interpolation: Interpolation = Interpolation.LINEAR
    final_sigma: FinalSigma = FinalSigma.ZERO
    timestep_type: TimestepType = TimestepType.DISCRETE
    sigma_min: float | None = None
    sigma_max: float | None = None

    def _plan_levels(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        training = self.training.sigmas
        timesteps, levels = self.space(steps)
        if self.interpolation is Interpolation.LOG_LINEAR:
            logs = np.log(training[[-1, 0]])
            levels = np.exp(interpolate_linearly(float(logs[0]), float(logs[1]), steps + 1))
        if self.sigma_spacing is not SigmaSpacing.TIMESTEPS:
            lowest = float(levels[-1]) if self.sigma_min is None else self.sigma_min
            highest = float(levels[0]) if self.sigma_max is None else self.sigma_max
            levels = space_sigmas(self.sigma_spacing, highest, lowest, steps)
            timesteps = find_timesteps(levels, training)
        if len(levels) == steps:
            levels = np.append(levels, training[0] if self.final_sigma is FinalSigma.SIGMA_MIN else 0.0)
        if self.timestep_type is TimestepType.CONTINUOUS and self.training.prediction is Prediction.VELOCITY:
            timesteps = np.float32(0.25) * np.log(levels[:-1].astype(np.float32))
        return timesteps, levels


def read_euler(fields: ScheduleFields) -> EulerSchedule:
    """Return the schedule of an EulerDiscreteScheduler's configuration.

    Raises:
        ModelError: A field has the wrong type or range, or sigma_min is not below sigma_max.
    """
    schedule = EulerSchedule(
        training=read_training(fields, DIFFUSION_PREDICTIONS, lowest_alpha=ZERO_SNR_ALPHA),
        sigma_spacing=read_sigma_spacing(fields),
        interpolation=fields.read_choice("interpolation_type", Interpolation.LINEAR),
        final_sigma=fields.read_choice("final_sigmas_type", FinalSigma.ZERO),
        timestep_type=fields.read_choice("timestep_type", TimestepType.DISCRETE),
        sigma_min=fields.read_optional_number("sigma_min", *SIGMA_LIMITS),
        sigma_max=fields.read_optional_number("sigma_max", *SIGMA_LIMITS),
    )
    if not (schedule.sigma_min or 0.0) < (schedule.sigma_max or math.inf):
        raise fields.refuse(
            "sigma_min", f"{schedule.sigma_min:g} is not below sigma_max {schedule.sigma_max:g}"
        )
    return schedule

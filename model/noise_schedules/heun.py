"""Heun's method along the noise levels (Karras et al., arXiv 2206.00364), as HeunDiscreteScheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.noise_schedules.exploding import ExplodingSchedule
from model.noise_schedules.fields import ScheduleFields
from model.noise_schedules.predictions import DIFFUSION_PREDICTIONS, Limits, read_limits
from model.noise_schedules.schedule import Pass, State
from model.noise_schedules.spacing import SigmaSpacing, find_timesteps, read_sigma_spacing, space_sigmas
from model.noise_schedules.training import read_training
from model.noise_schedules.two_pass import repeat_for_passes, step_along


@dataclass(frozen=True, eq=False)
class HeunSchedule(ExplodingSchedule):
    """Heun's method with its configuration: two passes in each step but the last."""

    limits: Limits
    sigma_spacing: SigmaSpacing

    @property
    def passes_per_step(self) -> int:
        """Evaluations of the model in each step but the last: predictor and corrector."""
        return 2

    def limit(self, clean: np.ndarray) -> np.ndarray:
        """Return predicted clean images clipped as the configuration asks."""
        return self.limits.apply(clean)

    def _plan_levels(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        timesteps, levels = self.space(steps)
        if self.sigma_spacing is not SigmaSpacing.TIMESTEPS:
            levels = space_sigmas(self.sigma_spacing, float(levels[0]), float(levels[-1]), steps)
            timesteps = find_timesteps(levels, self.training.sigmas)
        return repeat_for_passes(timesteps, np.append(levels, 0.0))

    def _step(self, model_pass: Pass) -> tuple[State, np.ndarray]:
        return step_along(model_pass, self.find_derivative(model_pass))


def read_heun(fields: ScheduleFields) -> HeunSchedule:
    """Return the schedule of a HeunDiscreteScheduler's configuration."""
    return HeunSchedule(
        training=read_training(
            fields, DIFFUSION_PREDICTIONS, beta_start=0.00085, beta_end=0.012, zero_snr=False
        ),
        limits=read_limits(fields, clips=True, thresholds=False),
        sigma_spacing=read_sigma_spacing(fields),
    )

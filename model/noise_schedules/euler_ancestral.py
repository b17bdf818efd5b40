"""Euler's method with fresh noise in each step, as EulerAncestralDiscreteScheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.noise_schedules.exploding import ZERO_SNR_ALPHA, ExplodingSchedule
from model.noise_schedules.fields import ScheduleFields
from model.noise_schedules.predictions import DIFFUSION_PREDICTIONS
from model.noise_schedules.schedule import Pass, State, Trajectory
from model.noise_schedules.training import read_training


@dataclass(frozen=True, eq=False)
class EulerAncestralSchedule(ExplodingSchedule):
    """Euler's method that steps below the next noise level, and returns to it by adding noise."""

    def needs_noise(self, trajectory: Trajectory, index: int) -> bool:
        """Return whether the next noise level is above 0."""
        return bool(trajectory.sigmas[index + 1] > 0)

    def _step(self, model_pass: Pass) -> tuple[State, np.ndarray]:
        sigma, sigma_next, noise = model_pass.sigma, model_pass.next_sigma, model_pass.noise
        square, square_next = sigma * sigma, sigma_next * sigma_next
        sigma_up = np.sqrt(square_next * (square - square_next) / square)
        sigma_down = np.sqrt(square_next - sigma_up * sigma_up)
        stepped = model_pass.images + self.find_derivative(model_pass) * (sigma_down - sigma)
        return (), stepped if noise is None else stepped + noise * sigma_up


def read_euler_ancestral(fields: ScheduleFields) -> EulerAncestralSchedule:
    """Return the schedule of an EulerAncestralDiscreteScheduler's configuration."""
    return EulerAncestralSchedule(read_training(fields, DIFFUSION_PREDICTIONS, lowest_alpha=ZERO_SNR_ALPHA))

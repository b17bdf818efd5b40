"""Schedules of a variance-exploding process, clean + sigma x Gaussian: Euler, Euler ancestral and Heun."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.noise_schedules.predictions import predict_clean_at_sigma
from model.noise_schedules.schedule import NoiseSchedule, Pass, State, Trajectory
from model.noise_schedules.spacing import Spacing, space_timesteps
from model.noise_schedules.training import Training

ZERO_SNR_ALPHA = 2.0**-24
"""Cumulative product of the last timestep after rescaling to zero SNR, so that its sigma is finite."""


@dataclass(frozen=True, eq=False)
class ExplodingSchedule(NoiseSchedule):
    """Schedule whose noise levels are ratios of noise and clean image, interpolated between training timesteps."""

    training: Training

    @property
    def most_steps(self) -> int:
        """Number of training timesteps."""
        return self.training.num_timesteps

    def space(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the timesteps, float32 [steps], and their noise levels, float64 [steps]."""
        training = self.training
        timesteps = space_timesteps(training.spacing, steps, self.most_steps, training.steps_offset)
        timesteps = timesteps.astype(np.float32)
        return timesteps, np.interp(timesteps, np.arange(self.most_steps), training.sigmas)

    def _plan(self, steps: int, tokens: int | None, sigmas: np.ndarray | None) -> Trajectory:
        timesteps, levels = self._plan_levels(steps)
        levels = levels.astype(np.float32)
        scale = levels.max()
        if self.training.spacing is Spacing.LEADING:
            scale = np.sqrt(scale * scale + np.float32(1))
        return Trajectory(timesteps.astype(np.float32), levels, float(scale))

    def _plan_levels(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the timesteps and noise levels of the trajectory of a number of steps, which ends without noise."""
        timesteps, levels = self.space(steps)
        return timesteps, np.append(levels, 0.0)

    def scale_input(self, trajectory: Trajectory, index: int, images: np.ndarray) -> np.ndarray:
        """Return the noisy images divided by sqrt(sigma^2 + 1), which gives them the variance of the training."""
        sigma = images.dtype.type(trajectory.sigmas[index])
        return images / np.sqrt(sigma * sigma + images.dtype.type(1))

    def find_scales(self, trajectory: Trajectory, index: int) -> tuple[np.float32, np.float32]:
        """Return 1 and sigma."""
        return np.float32(1), trajectory.sigmas[index]

    def find_derivative(self, model_pass: Pass) -> np.ndarray:
        """Return the derivative of the images by sigma before a pass."""
        images, sigma = model_pass.images, model_pass.sigma
        clean = predict_clean_at_sigma(self.training.prediction, model_pass.output, images, sigma)
        return (images - self.limit(clean)) / sigma

    def limit(self, clean: np.ndarray) -> np.ndarray:
        """Return predicted clean images within the bounds of the schedule."""
        return clean

    def _step(self, model_pass: Pass) -> tuple[State, np.ndarray]:
        derivative = self.find_derivative(model_pass)
        return (), model_pass.images + derivative * (model_pass.next_sigma - model_pass.sigma)

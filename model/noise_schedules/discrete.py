"""Schedules that step between training timesteps of a variance-preserving process: DDPM and DDIM."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from model.errors import ModelError
from model.noise_schedules.predictions import Limits, Prediction
from model.noise_schedules.schedule import NoiseSchedule, Pass, Trajectory
from model.noise_schedules.spacing import space_timesteps
from model.noise_schedules.training import Training


@dataclass(frozen=True, eq=False)
class DiscreteSchedule(NoiseSchedule):
    """Schedule whose noise levels are standard deviations of the noise, sqrt(1 - alphas_cumprod)."""

    training: Training
    limits: Limits

    @property
    def most_steps(self) -> int:
        """Number of training timesteps."""
        return self.training.num_timesteps

    def _plan(self, steps: int, tokens: int | None, sigmas: np.ndarray | None) -> Trajectory:
        training = self.training
        timesteps = space_timesteps(training.spacing, steps, self.most_steps, training.steps_offset)
        timesteps = timesteps.round().astype(np.int64)
        alphas = training.alphas_cumprod[timesteps]
        if alphas[0] == 0 and training.prediction is Prediction.EPSILON:
            raise ModelError(
                "rescale_betas_zero_snr leaves no signal at the first timestep, from which prediction_type epsilon "
                "gives no clean image; use v_prediction or sample"
            )
        alphas = np.append(alphas, self.find_previous_alpha(timesteps, steps - 1))
        return Trajectory(timesteps, np.sqrt(np.float32(1) - alphas))

    @abstractmethod
    def find_previous_alpha(self, timesteps: np.ndarray, index: int) -> np.float32:
        """Return the cumulative product after the step from `timesteps[index]`."""

    def find_alphas(self, model_pass: Pass) -> tuple[np.floating, np.floating]:
        """Return the cumulative products before and after a step as scalars of the images' dtype."""
        timesteps, dtype = model_pass.trajectory.timesteps, model_pass.images.dtype.type
        alpha = self.training.alphas_cumprod[timesteps[model_pass.index]]
        return dtype(alpha), dtype(self.find_previous_alpha(timesteps, model_pass.index))

    def find_scales(self, trajectory: Trajectory, index: int) -> tuple[np.float32, np.float32]:
        """Return sqrt(alphas_cumprod) and sqrt(1 - alphas_cumprod)."""
        alpha = self.training.alphas_cumprod[trajectory.timesteps[index]]
        return np.sqrt(alpha), np.sqrt(np.float32(1) - alpha)

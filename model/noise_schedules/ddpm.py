"""DDPM: ancestral sampling of the training's Markov chain (Ho et al., arXiv 2006.11239), as DDPMScheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from model.errors import ModelError
from model.noise_schedules.discrete import DiscreteSchedule
from model.noise_schedules.fields import ScheduleFields
from model.noise_schedules.predictions import DIFFUSION_PREDICTIONS, predict_clean, read_limits
from model.noise_schedules.schedule import Pass, State, Trajectory
from model.noise_schedules.spacing import Spacing
from model.noise_schedules.training import read_training


class Variance(Enum):
    """Variance of the noise that a step adds, by its diffusers name."""

    FIXED_SMALL = "fixed_small"
    FIXED_SMALL_LOG = "fixed_small_log"
    FIXED_LARGE = "fixed_large"
    LEARNED = "learned"
    LEARNED_RANGE = "learned_range"


SMALLEST_VARIANCE = 1e-20
"""Lower limit of the posterior variance, which is 0 in a step to the clean image."""


@dataclass(frozen=True, eq=False)
class DdpmSchedule(DiscreteSchedule):
    """DDPM with its configuration. `variance` chooses the noise that a step adds."""

    variance: Variance = Variance.FIXED_SMALL

    def find_previous_alpha(self, timesteps: np.ndarray, index: int) -> np.float32:
        """Return the cumulative product at the next timestep of the trajectory, or 1 after the last."""
        if index + 1 == len(timesteps):
            return np.float32(1)
        return np.float32(self.training.alphas_cumprod[timesteps[index + 1]])

    def needs_noise(self, trajectory: Trajectory, index: int) -> bool:
        """Return whether the timestep is above 0."""
        return bool(trajectory.timesteps[index] > 0)

    def _step(self, model_pass: Pass) -> tuple[State, np.ndarray]:
        images = model_pass.images
        alpha, alpha_previous = self.find_alphas(model_pass)
        unit = images.dtype.type(1)
        noise_variance, previous_variance = unit - alpha, unit - alpha_previous
        step_alpha = alpha / alpha_previous
        step_beta = unit - step_alpha
        signal = np.sqrt(alpha)
        clean = predict_clean(
            self.training.prediction, model_pass.output, images, signal, np.sqrt(noise_variance)
        )
        clean = self.limits.apply(clean)
        clean_weight = np.sqrt(alpha_previous) * step_beta / noise_variance
        noisy_weight = np.sqrt(step_alpha) * previous_variance / noise_variance
        mean = clean_weight * clean + noisy_weight * images
        if model_pass.noise is None:
            return (), mean
        posterior = max(previous_variance / noise_variance * step_beta, images.dtype.type(SMALLEST_VARIANCE))
        return (), mean + self._find_deviation(posterior, step_beta, model_pass.variance) * model_pass.noise

    def _find_deviation(
        self, posterior: np.floating, step_beta: np.floating, variance: np.ndarray | None
    ) -> np.ndarray | np.floating:
        """Return the standard deviation of the noise that a step adds.

        Args:
            posterior: variance of the chain's posterior, the smallest.
            step_beta: variance of the chain's forward step, the largest.
            variance: the model's second half of channels, if it has one.

        Raises:
            ModelError: The variance is learned, and the model returns none.
        """
        if self.variance is Variance.FIXED_LARGE:
            return np.sqrt(step_beta)
        if self.variance in (Variance.FIXED_SMALL, Variance.FIXED_SMALL_LOG):
            return np.sqrt(posterior)
        if variance is None:
            raise ModelError(
                f"variance_type {self.variance.value} needs a model whose output has twice the channels of the images"
            )
        if self.variance is Variance.LEARNED:
            return np.sqrt(variance)
        dtype = variance.dtype.type
        fraction = (variance + dtype(1)) / dtype(2)
        logarithm = fraction * np.log(step_beta) + (dtype(1) - fraction) * np.log(posterior)
        return np.exp(dtype(0.5) * logarithm)


def read_ddpm(fields: ScheduleFields) -> DdpmSchedule:
    """Return the schedule of a DDPMScheduler's configuration."""
    return DdpmSchedule(
        training=read_training(fields, DIFFUSION_PREDICTIONS, Spacing.LEADING),
        limits=read_limits(fields, clips=True, default_clip=True),
        variance=fields.read_choice("variance_type", Variance.FIXED_SMALL),
    )

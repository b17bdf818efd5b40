"""DDIM: implicit sampling with the training's noise levels (Song et al., arXiv 2010.02502), as DDIMScheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.errors import ModelError
from model.noise_schedules.discrete import DiscreteSchedule
from model.noise_schedules.fields import ScheduleFields
from model.noise_schedules.predictions import DIFFUSION_PREDICTIONS, predict_clean, predict_noise, read_limits
from model.noise_schedules.schedule import Pass, State, Trajectory
from model.noise_schedules.spacing import Spacing
from model.noise_schedules.training import read_training


@dataclass(frozen=True, eq=False)
class DdimSchedule(DiscreteSchedule):
    """DDIM with its configuration.

    final_alpha  cumulative product after the last step
    eta          share of DDPM's noise that a step adds. Configurations do not have it; `dataclasses.replace` sets it
    """

    final_alpha: float = 1.0
    eta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ModelError(
                f"eta {self.eta!r:.60} must be from 0, without noise, to 1, with the noise of DDPM"
            )

    def find_previous_alpha(self, timesteps: np.ndarray, index: int) -> np.float32:
        """Return the cumulative product one step's timesteps earlier, or the final one before timestep 0.

        The earlier timestep is not always the next of the trajectory, as in DDIMScheduler.
        """
        previous = timesteps[index] - self.most_steps // len(timesteps)
        return np.float32(self.final_alpha if previous < 0 else self.training.alphas_cumprod[previous])

    def needs_noise(self, trajectory: Trajectory, index: int) -> bool:
        """Return whether steps add noise."""
        return self.eta > 0

    def _step(self, model_pass: Pass) -> tuple[State, np.ndarray]:
        images, output, noise = model_pass.images, model_pass.output, model_pass.noise
        alpha, alpha_previous = self.find_alphas(model_pass)
        unit = images.dtype.type(1)
        noise_variance, previous_variance = unit - alpha, unit - alpha_previous
        scales = np.sqrt(alpha), np.sqrt(noise_variance)
        clean = self.limits.apply(predict_clean(self.training.prediction, output, images, *scales))
        predicted_noise = predict_noise(self.training.prediction, output, images, *scales)
        added_variance = previous_variance / noise_variance * (unit - alpha / alpha_previous)
        deviation = images.dtype.type(self.eta) * np.sqrt(added_variance)
        direction = np.sqrt(previous_variance - deviation * deviation) * predicted_noise
        mean = np.sqrt(alpha_previous) * clean + direction
        return (), mean if noise is None else mean + deviation * noise


def read_ddim(fields: ScheduleFields) -> DdimSchedule:
    """Return the schedule of a DDIMScheduler's configuration."""
    training = read_training(fields, DIFFUSION_PREDICTIONS, Spacing.LEADING)
    ends_clean = fields.read_flag("set_alpha_to_one", default=True)
    return DdimSchedule(
        training=training,
        limits=read_limits(fields, clips=True, default_clip=True),
        final_alpha=1.0 if ends_clean else float(training.alphas_cumprod[0]),
    )

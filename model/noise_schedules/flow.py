"""Schedules of a flow, (1 - sigma) x clean + sigma x Gaussian: Euler and Heun on flow-matching models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.errors import ModelError
from model.noise_schedules.schedule import NoiseSchedule, Trajectory

SHIFT_LIMITS = (1e-4, 1e4)
"""Limits of a constant shift; published models have 1 to 12."""


@dataclass(frozen=True, eq=False)
class FlowSchedule(NoiseSchedule):
    """Schedule whose noise levels are shares of noise from 1 down to 0.

    num_train_timesteps  factor between a noise level and the timestep that the model receives
    shift                factor that moves steps towards high noise levels
    """

    num_train_timesteps: int
    shift: float

    @property
    def most_steps(self) -> int:
        """Number of training timesteps."""
        return self.num_train_timesteps

    @property
    def takes_sigmas(self) -> bool:
        """Whether `plan` takes noise levels, which are shifted as evenly spaced ones are."""
        return True

    def space(self, steps: int) -> np.ndarray:
        """Return evenly spaced noise levels from 1 to 1 / num_train_timesteps, float64 [steps]."""
        lowest = float(np.float32(1) / np.float32(self.num_train_timesteps))
        return (
            np.linspace(self.num_train_timesteps, lowest * self.num_train_timesteps, steps) / self.most_steps
        )

    def shift_sigmas(self, sigmas: np.ndarray) -> np.ndarray:
        """Return noise levels moved by the constant shift."""
        return self.shift * sigmas / (1 + (self.shift - 1) * sigmas)

    def round_sigmas(self, sigmas: np.ndarray) -> np.ndarray:
        """Return noise levels as float32.

        Raises:
            ModelError: They do not descend, because the shift is too large for the number of steps.
        """
        levels = sigmas.astype(np.float32)
        if not (np.diff(levels, append=np.float32(0)) < 0).all():
            raise ModelError(f"the shift makes some of {len(levels)} noise levels equal; use a smaller shift")
        return levels

    def find_scales(self, trajectory: Trajectory, index: int) -> tuple[np.float32, np.float32]:
        """Return 1 - sigma and sigma."""
        sigma = trajectory.sigmas[index]
        return np.float32(1) - sigma, sigma

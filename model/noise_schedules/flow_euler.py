"""Euler's method on a flow (Esser et al., arXiv 2403.03206), as FlowMatchEulerDiscreteScheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.errors import ModelError
from model.noise_schedules.fields import ScheduleFields
from model.noise_schedules.flow import SHIFT_LIMITS, FlowSchedule
from model.noise_schedules.schedule import Pass, State, Trajectory
from model.noise_schedules.shifting import DynamicShift, read_dynamic_shift
from model.noise_schedules.spacing import SigmaSpacing, read_sigma_spacing, space_sigmas


@dataclass(frozen=True, eq=False)
class FlowEulerSchedule(FlowSchedule):
    """Euler's method on a flow with its configuration.

    dynamic_shift   shift by the number of image tokens, which replaces `shift`; None for a constant shift
    shift_terminal  last noise level above 0 after stretching; None for no stretching
    is_inverted     whether noise levels are shares of the clean image and go up to 1
    is_stochastic   whether each step draws fresh noise for the predicted clean image
    """

    dynamic_shift: DynamicShift | None = None
    shift_terminal: float | None = None
    sigma_spacing: SigmaSpacing = SigmaSpacing.TIMESTEPS
    is_inverted: bool = False
    is_stochastic: bool = False

    def _plan(self, steps: int, tokens: int | None, sigmas: np.ndarray | None) -> Trajectory:
        levels = self.space(steps) if sigmas is None else sigmas
        if self.dynamic_shift is None:
            levels = self.shift_sigmas(levels)
        else:
            levels = self.dynamic_shift.apply(levels, tokens)
        if self.shift_terminal is not None:
            levels = stretch_to_terminal(levels, self.shift_terminal)
        if self.sigma_spacing is not SigmaSpacing.TIMESTEPS:
            levels = space_sigmas(self.sigma_spacing, float(levels[0]), float(levels[-1]), steps)
        levels = self.round_sigmas(levels)
        if self.is_inverted:
            levels = np.float32(1) - levels
        timesteps = levels * np.float32(self.num_train_timesteps)
        return Trajectory(timesteps, np.append(levels, np.float32(self.is_inverted)))

    def needs_noise(self, trajectory: Trajectory, index: int) -> bool:
        """Return whether steps are stochastic and the next noise level is above 0."""
        return self.is_stochastic and bool(trajectory.sigmas[index + 1] > 0)

    def find_scales(self, trajectory: Trajectory, index: int) -> tuple[np.float32, np.float32]:
        """Return the shares of clean image and noise."""
        signal, noise = super().find_scales(trajectory, index)
        return (noise, signal) if self.is_inverted else (signal, noise)

    def _step(self, model_pass: Pass) -> tuple[State, np.ndarray]:
        images, sigma, next_sigma = model_pass.images, model_pass.sigma, model_pass.next_sigma
        if not self.is_stochastic:
            return (), images + (next_sigma - sigma) * model_pass.output
        signal = (images.dtype.type(1) - next_sigma) * (images - sigma * model_pass.output)
        return (), signal if model_pass.noise is None else signal + next_sigma * model_pass.noise


def stretch_to_terminal(sigmas: np.ndarray, terminal: float) -> np.ndarray:
    """Return noise levels whose distances from 1 are scaled so that the last becomes `terminal`.

    Raises:
        ModelError: There is a single step, whose noise level 1 cannot be stretched.
    """
    distances = 1 - sigmas
    if distances[-1] == 0:
        raise ModelError("shift_terminal needs at least 2 steps, because the first noise level stays 1")
    return 1 - distances / (distances[-1] / (1 - terminal))


def read_flow_euler(fields: ScheduleFields) -> FlowEulerSchedule:
    """Return the schedule of a FlowMatchEulerDiscreteScheduler's configuration.

    Raises:
        ModelError: A field has the wrong type or range, or both invert_sigmas and stochastic_sampling are true.
    """
    schedule = FlowEulerSchedule(
        num_train_timesteps=fields.read_count("num_train_timesteps", 1000),
        shift=fields.read_number("shift", 1.0, *SHIFT_LIMITS),
        dynamic_shift=read_dynamic_shift(fields),
        shift_terminal=fields.read_optional_number("shift_terminal", above=0, below=1),
        sigma_spacing=read_sigma_spacing(fields),
        is_inverted=fields.read_flag("invert_sigmas"),
        is_stochastic=fields.read_flag("stochastic_sampling"),
    )
    if schedule.is_inverted and schedule.is_stochastic:
        raise fields.refuse(
            "stochastic_sampling", "is not defined for inverted sigmas; set invert_sigmas to false"
        )
    return schedule

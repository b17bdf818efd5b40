"""Heun's method on a flow, as FlowMatchHeunDiscreteScheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.noise_schedules.fields import ScheduleFields
from model.noise_schedules.flow import SHIFT_LIMITS, FlowSchedule
from model.noise_schedules.schedule import Pass, State, Trajectory
from model.noise_schedules.two_pass import repeat_for_passes, step_along


@dataclass(frozen=True, eq=False)
class FlowHeunSchedule(FlowSchedule):
    """Heun's method on a flow with its configuration: two passes in each step but the last."""

    @property
    def passes_per_step(self) -> int:
        """Evaluations of the model in each step but the last: predictor and corrector."""
        return 2

    def _plan(self, steps: int, tokens: int | None, sigmas: np.ndarray | None) -> Trajectory:
        levels = self.round_sigmas(self.shift_sigmas(self.space(steps) if sigmas is None else sigmas))
        timesteps = levels * np.float32(self.num_train_timesteps)
        return Trajectory(*repeat_for_passes(timesteps, np.append(levels, np.float32(0))))

    def _step(self, model_pass: Pass) -> tuple[State, np.ndarray]:
        images, sigma = model_pass.images, model_pass.sigma
        # The flow's derivative is the output itself; the detour over the clean image keeps diffusers' rounding.
        clean = images - model_pass.output * sigma
        return step_along(model_pass, (images - clean) / sigma)


def read_flow_heun(fields: ScheduleFields) -> FlowHeunSchedule:
    """Return the schedule of a FlowMatchHeunDiscreteScheduler's configuration."""
    return FlowHeunSchedule(
        num_train_timesteps=fields.read_count("num_train_timesteps", 1000),
        shift=fields.read_number("shift", 1.0, *SHIFT_LIMITS),
    )

"""DPM-Solver and DPM-Solver++, multistep, of orders 1 to 3 (Lu et al., arXiv 2206.00927 and 2211.01095).

As DPMSolverMultistepScheduler. The solvers integrate over lambda, the logarithm of the ratio of clean image and noise.
DPM-Solver integrates the predicted noise, DPM-Solver++ the predicted clean image. Weights are computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from model.errors import ModelError
from model.noise_schedules.dpm_weights import Algorithm, SolverType, Weights, find_weights
from model.noise_schedules.exploding import ZERO_SNR_ALPHA
from model.noise_schedules.fields import ScheduleFields
from model.noise_schedules.flow import SHIFT_LIMITS
from model.noise_schedules.predictions import (
    DIFFUSION_PREDICTIONS,
    Limits,
    Prediction,
    predict_clean,
    predict_noise,
    read_limits,
)
from model.noise_schedules.schedule import NoiseSchedule, Pass, State, Trajectory
from model.noise_schedules.shifting import DynamicShift, ShiftType
from model.noise_schedules.spacing import (
    FinalSigma,
    SigmaSpacing,
    Spacing,
    check_last_timestep,
    find_timesteps,
    read_sigma_spacing,
    space_sigmas,
    space_trailing,
)
from model.noise_schedules.training import BetaSchedule, Training, read_training

FEW_STEPS = 15
"""Trajectories of fewer steps take lower orders in the last two steps if lower_order_final is true."""


class LearnedVariance(Enum):
    """Kind of learned variance in the model's second half of channels, which the solver leaves out."""

    LEARNED = "learned"
    LEARNED_RANGE = "learned_range"


@dataclass(frozen=True, eq=False)
class DpmSolverSchedule(NoiseSchedule):
    """Multistep DPM-Solver with its configuration. The state has the predictions of the last passes, oldest first.

    order                highest order, from 1 to 3; the first passes have lower orders
    lower_order_final    whether trajectories of fewer than 15 steps end with lower orders
    euler_at_final       whether the last step has order 1
    flow_shift           shift of the noise levels of a flow
    dynamic_shift        shift by the number of image tokens, which replaces `flow_shift`; None for a constant shift
    lambda_min           timesteps whose lambda is lower are left out
    exact_curvature      whether order 3 gives the curvature its exact weight. diffusers takes half of it, which limits
                         the order to 2. Configurations do not have this; `dataclasses.replace` sets it
    """

    training: Training
    limits: Limits
    order: int
    algorithm: Algorithm
    solver_type: SolverType
    lower_order_final: bool
    euler_at_final: bool
    sigma_spacing: SigmaSpacing
    flow_shift: float
    dynamic_shift: DynamicShift | None
    final_sigma: FinalSigma
    lambda_min: float
    exact_curvature: bool = False

    @property
    def most_steps(self) -> int:
        """Number of training timesteps."""
        return self.training.num_timesteps

    def _plan(self, steps: int, tokens: int | None, sigmas: np.ndarray | None) -> Trajectory:
        timesteps, levels = self._space(steps, tokens)
        if self.training.beta_schedule is not BetaSchedule.COSINE and self.sigma_spacing in (
            SigmaSpacing.KARRAS,
            SigmaSpacing.UNIFORM_LAMBDA,
        ):
            timesteps = timesteps.round()
        final = self.training.sigmas[0] if self.final_sigma is FinalSigma.SIGMA_MIN else 0.0
        levels = np.append(levels, final).astype(np.float32)
        if not (np.diff(levels[:-1]) < 0).all() or levels[-1] > levels[-2]:
            raise ModelError(f"{steps} steps give noise levels that do not descend; use fewer steps")
        if self.sigma_spacing is SigmaSpacing.FLOW and levels[0] >= 1:
            raise ModelError(
                "the shift leaves no clean image at the first noise level; use a smaller flow_shift"
            )
        return Trajectory(timesteps.astype(np.int64), levels)

    def _space(self, steps: int, tokens: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the timesteps and noise levels of a number of steps, without the final noise level."""
        training = self.training.sigmas
        spacing = self.sigma_spacing
        if spacing is SigmaSpacing.TIMESTEPS:
            timesteps = self._space_timesteps(steps)
            return timesteps, np.interp(timesteps, np.arange(self.most_steps), training)
        if spacing is SigmaSpacing.FLOW:
            shares = 1.0 - np.linspace(1, 1 / self.most_steps, steps + 1)
            shift = self.flow_shift if self.dynamic_shift is None else self.dynamic_shift.find_factor(tokens)
            levels = (shift * shares / (1 + (shift - 1) * shares))[:0:-1]
            return levels * self.most_steps, levels
        if spacing is SigmaSpacing.UNIFORM_LAMBDA:
            logs = np.log(training)
            levels = np.exp(np.linspace(float(logs[-1]), float(logs[0]), steps))
        else:
            levels = space_sigmas(spacing, float(training[-1]), float(training[0]), steps)
        return find_timesteps(levels, training), levels

    def _space_timesteps(self, steps: int) -> np.ndarray:
        """Return the timesteps that the configuration's spacing gives, float64, descending whole numbers."""
        alphas = self.training.alphas_cumprod.astype(np.float64)
        lambdas = 0.5 * np.log(alphas / (1 - alphas))
        last = int((lambdas >= self.lambda_min).sum())
        if last < 2:
            raise ModelError(
                f"lambda_min_clipped {self.lambda_min:g} leaves {last} timesteps; use a lower one"
            )
        if self.training.spacing is Spacing.LINSPACE:
            return np.linspace(0, last - 1, steps + 1).round()[:0:-1]
        if self.training.spacing is Spacing.TRAILING:
            return space_trailing(last, self.most_steps / steps)
        timesteps = (np.arange(steps + 1) * (last // (steps + 1)))[:0:-1] + float(self.training.steps_offset)
        check_last_timestep(timesteps, self.most_steps, self.training.steps_offset)
        return timesteps

    def needs_noise(self, trajectory: Trajectory, index: int) -> bool:
        """Return whether the algorithm is stochastic and the next noise level is above 0."""
        return self.algorithm.is_stochastic and bool(trajectory.sigmas[index + 1] > 0)

    def split_sigma(self, sigma: Any) -> tuple[Any, Any]:
        """Return the scales of clean image and noise at a noise level, scalars of the same dtype."""
        unit = type(sigma)(1)
        if self.sigma_spacing is SigmaSpacing.FLOW:
            return unit - sigma, sigma
        signal = unit / np.sqrt(sigma * sigma + unit)
        return signal, sigma * signal

    def find_scales(self, trajectory: Trajectory, index: int) -> tuple[np.float32, np.float32]:
        """Return the scales of clean image and noise."""
        return self.split_sigma(trajectory.sigmas[index])

    def _step(self, model_pass: Pass) -> tuple[State, np.ndarray]:
        images, noise = model_pass.images, model_pass.noise
        prediction = self._convert(model_pass)
        history = (*model_pass.state, prediction)
        state = history[-(self.order - 1) :] if self.order > 1 else ()
        weights = self._find_weights(model_pass.trajectory, model_pass.index, len(model_pass.state))
        if weights is None:
            return state, images
        dtype = images.dtype.type
        stepped = dtype(weights.images) * images
        for weight, past in zip(weights.predictions, reversed(history)):
            stepped += dtype(weight) * past
        if noise is not None:
            stepped += dtype(weights.noise) * noise
        return state, stepped

    def _convert(self, model_pass: Pass) -> np.ndarray:
        """Return the quantity that the algorithm integrates: predicted clean images or noise."""
        images = model_pass.images
        scales = self.split_sigma(model_pass.sigma)
        clean = predict_clean(self.training.prediction, model_pass.output, images, *scales)
        if self.algorithm.integrates_clean:
            return self.limits.apply(clean)
        if self.limits.quantile is not None:
            return predict_noise(Prediction.SAMPLE, self.limits.apply(clean), images, *scales)
        return predict_noise(self.training.prediction, model_pass.output, images, *scales)

    def _find_weights(self, trajectory: Trajectory, index: int, past: int) -> Weights | None:
        """Return the weights of a step after `past` passes; None if its noise level stays the same."""
        first = index - self._find_order(trajectory, index, past) + 1
        levels = [np.float64(sigma) for sigma in trajectory.sigmas[first : index + 2]]
        if levels[-1] == levels[-2]:
            return None
        scales = [self.split_sigma(level) for level in levels]
        return find_weights(self.algorithm, self.solver_type, scales, self.exact_curvature)

    def _find_order(self, trajectory: Trajectory, index: int, past: int) -> int:
        """Return the order of a step after `past` passes."""
        remaining = trajectory.passes - 1 - index
        is_short = self.lower_order_final and trajectory.passes < FEW_STEPS
        highest = self.order
        if remaining == 0 and (self.euler_at_final or is_short or self.final_sigma is FinalSigma.ZERO):
            highest = 1
        elif remaining == 1 and is_short:
            highest = 2
        return min(self.order, highest, past + 1)


def read_dpm_solver(fields: ScheduleFields) -> DpmSolverSchedule:
    """Return the schedule of a DPMSolverMultistepScheduler's configuration.

    Raises:
        ModelError: A field has the wrong type or range, or contradicts another.
    """
    dynamic_shift = DynamicShift() if fields.read_flag("use_dynamic_shifting") else None
    if fields.read_choice("time_shift_type", ShiftType.EXPONENTIAL) is not ShiftType.EXPONENTIAL:
        raise fields.refuse("time_shift_type", "linear is for flow matching; DPM-Solver shifts exponentially")
    fields.read_optional_choice("variance_type", LearnedVariance)
    schedule = DpmSolverSchedule(
        training=read_training(
            fields, (*DIFFUSION_PREDICTIONS, Prediction.FLOW), lowest_alpha=ZERO_SNR_ALPHA
        ),
        limits=read_limits(fields),
        order=fields.read_count("solver_order", 2, most=3),
        algorithm=fields.read_choice("algorithm_type", Algorithm.CLEAN),
        solver_type=fields.read_choice("solver_type", SolverType.MIDPOINT),
        lower_order_final=fields.read_flag("lower_order_final", default=True),
        euler_at_final=fields.read_flag("euler_at_final"),
        sigma_spacing=read_sigma_spacing(fields, SigmaSpacing.UNIFORM_LAMBDA, SigmaSpacing.FLOW),
        flow_shift=fields.read_number("flow_shift", 1.0, *SHIFT_LIMITS),
        dynamic_shift=dynamic_shift,
        final_sigma=fields.read_choice("final_sigmas_type", FinalSigma.ZERO),
        lambda_min=fields.read_lower_limit("lambda_min_clipped"),
    )
    check_consistency(fields, schedule)
    return schedule


def check_consistency(fields: ScheduleFields, schedule: DpmSolverSchedule) -> None:
    """Check that the fields of a configuration fit together.

    Raises:
        ModelError: A field contradicts another.
    """
    algorithm, prediction = schedule.algorithm, schedule.training.prediction
    is_flow = schedule.sigma_spacing is SigmaSpacing.FLOW
    if schedule.order == 3 and algorithm.is_stochastic:
        raise fields.refuse("solver_order", f"3 is not computed for {algorithm.value}; use 1 or 2")
    if not algorithm.integrates_clean and schedule.final_sigma is FinalSigma.ZERO:
        raise fields.refuse("final_sigmas_type", f"{algorithm.value} cannot end at zero; use sigma_min")
    if prediction is Prediction.FLOW and not (is_flow and algorithm.integrates_clean):
        raise fields.refuse(
            "prediction_type", "flow_prediction needs use_flow_sigmas and a dpmsolver++ algorithm"
        )
    if schedule.dynamic_shift is not None and not is_flow:
        raise fields.refuse("use_dynamic_shifting", "shifts flow sigmas only; set use_flow_sigmas to true")

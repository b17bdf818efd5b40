"""Noise levels of training: the betas of a configuration and the cumulative products that schedules read."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from model.noise_schedules.fields import ScheduleFields
from model.noise_schedules.predictions import Prediction
from model.noise_schedules.spacing import Spacing


class BetaSchedule(Enum):
    """Shape of the betas over the training timesteps."""

    LINEAR = "linear"
    SCALED_LINEAR = "scaled_linear"
    COSINE = "squaredcos_cap_v2"


@dataclass(frozen=True, eq=False)
class Training:
    """What a configuration says about the training of the model.

    alphas_cumprod  share of the clean image's variance at each training timestep, float32 [timesteps], read-only
    prediction      quantity that the model predicts
    spacing         placement of the inference timesteps
    steps_offset    number added to the timesteps of the spacing "leading"
    beta_schedule   shape of the betas; kept because solvers round timesteps by it
    """

    alphas_cumprod: np.ndarray
    prediction: Prediction
    spacing: Spacing
    steps_offset: int
    beta_schedule: BetaSchedule

    @property
    def num_timesteps(self) -> int:
        """Number of training timesteps."""
        return len(self.alphas_cumprod)

    @property
    def sigmas(self) -> np.ndarray:
        """Ratio of the standard deviations of noise and clean image at each training timestep, float32 [timesteps]."""
        alphas = self.alphas_cumprod
        return np.sqrt((np.float32(1) - alphas) / alphas)


def read_training(
    fields: ScheduleFields,
    predictions: tuple[Prediction, ...],
    spacing: Spacing = Spacing.LINSPACE,
    beta_start: float = 0.0001,
    beta_end: float = 0.02,
    zero_snr: bool = True,
    lowest_alpha: float = 0.0,
) -> Training:
    """Return what a configuration says about training.

    Args:
        fields: the fields of the configuration.
        predictions: quantities that the class accepts as prediction_type.
        spacing: the class's default of timestep_spacing.
        beta_start: the class's default.
        beta_end: the class's default.
        zero_snr: whether the class reads rescale_betas_zero_snr.
        lowest_alpha: cumulative product that replaces the zero of the last timestep after rescaling.

    Raises:
        ModelError: A field has the wrong type or range, or trained_betas has not one number for each timestep.
    """
    timesteps = fields.read_count("num_train_timesteps", 1000)
    shape = fields.read_choice("beta_schedule", BetaSchedule.LINEAR)
    start = fields.read_number("beta_start", beta_start, above=0, below=1)
    end = fields.read_number("beta_end", beta_end, above=0, below=1)
    betas = fields.read_numbers("trained_betas", above=0, below=1)
    if betas is None:
        betas = compute_betas(shape, start, end, timesteps)
    elif len(betas) != timesteps:
        raise fields.refuse("trained_betas", f"{len(betas)} betas for num_train_timesteps {timesteps}")
    alphas_cumprod = multiply_cumulatively(np.float32(1) - betas)
    check_levels(fields, alphas_cumprod, lowest=np.float32(0))
    if zero_snr and fields.read_flag("rescale_betas_zero_snr"):
        if timesteps < 2:
            raise fields.refuse("rescale_betas_zero_snr", "needs at least 2 training timesteps")
        alphas_cumprod = multiply_cumulatively(np.float32(1) - rescale_to_zero_snr(alphas_cumprod))
        check_levels(fields, alphas_cumprod[:-1], lowest=alphas_cumprod[-1])
        alphas_cumprod[-1] = lowest_alpha
    alphas_cumprod.setflags(write=False)
    prediction = fields.read_choice("prediction_type", Prediction.EPSILON)
    if prediction not in predictions:
        supported = ", ".join(supported.value for supported in predictions)
        raise fields.refuse("prediction_type", f"{prediction.value} is not supported; use one of {supported}")
    return Training(
        alphas_cumprod,
        prediction,
        fields.read_choice("timestep_spacing", spacing),
        fields.read_count("steps_offset", 0, lowest=0),
        shape,
    )


def compute_betas(shape: BetaSchedule, start: float, end: float, timesteps: int) -> np.ndarray:
    """Return the betas of a shape, float32 [timesteps]. The cosine has no start and end."""
    if shape is BetaSchedule.LINEAR:
        return interpolate_linearly(start, end, timesteps)
    if shape is BetaSchedule.SCALED_LINEAR:
        roots = interpolate_linearly(start**0.5, end**0.5, timesteps)
        return roots * roots
    levels = [math.cos((i / timesteps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(timesteps + 1)]
    return np.array(
        [min(1 - after / before, 0.999) for before, after in itertools.pairwise(levels)], np.float32
    )


def interpolate_linearly(start: float, end: float, count: int) -> np.ndarray:
    """Return `count` float32 numbers from start to end, with the bits of torch.linspace on CPUs with FMA.

    torch counts the first half up from the start and the second half down from the end. It rounds the distance of
    two numbers to float32, and each number once.
    """
    first, last = np.float32(start), np.float32(end)
    if count == 1:
        return np.array([first])
    distance = np.float64((last - first) / np.float32(count - 1))
    indices = np.arange(count)
    upward = np.float64(first) + distance * indices
    downward = np.float64(last) - distance * (count - 1 - indices)
    return np.where(indices < count // 2, upward, downward).astype(np.float32)


def check_levels(fields: ScheduleFields, alphas_cumprod: np.ndarray, lowest: np.floating) -> None:
    """Check that cumulative products go down from below 1 to above a lowest number.

    Raises:
        ModelError: Some neighbours are equal in float32.
    """
    levels = np.concatenate([[1], alphas_cumprod, [lowest]])
    if not (np.diff(levels) < 0).all():
        name = "beta_start and beta_end" if fields.is_absent("trained_betas") else "trained_betas"
        problem = (
            "the noise levels of some timesteps are equal in float32; use betas nearer to 0.0001 and 0.02"
        )
        raise fields.refuse(name, problem)


def rescale_to_zero_snr(alphas_cumprod: np.ndarray) -> np.ndarray:
    """Return the betas, float32, that leave no signal at the last timestep (Lin et al., arXiv 2305.08891, algorithm 1).

    The betas follow from cumulative products whose square roots are shifted and scaled, so that the first one stays.
    """
    roots = np.sqrt(alphas_cumprod)
    first, last = roots[0], roots[-1]
    roots = (roots - last) * (first / (first - last))
    levels = roots * roots
    return np.float32(1) - np.concatenate([levels[:1], levels[1:] / levels[:-1]])


def multiply_cumulatively(factors: np.ndarray) -> np.ndarray:
    """Return the cumulative products of float32 factors: accumulated in float64, each rounded once, as torch does."""
    return np.cumprod(factors, dtype=np.float64).astype(np.float32)

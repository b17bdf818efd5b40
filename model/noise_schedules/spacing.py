"""Inference timesteps and noise levels: which of the training's are used, and how they are spaced."""

from __future__ import annotations

import math
from enum import Enum

import numpy as np

from model.errors import ModelError
from model.noise_schedules.fields import CODE, ScheduleFields

RHO = 7.0
"""Exponent of the Karras spacing (arXiv 2206.00364)."""


class Spacing(Enum):
    """Placement of the inference timesteps among the training timesteps (arXiv 2305.08891, table 2)."""

    LINSPACE = "linspace"
    LEADING = "leading"
    TRAILING = "trailing"


class SigmaSpacing(Enum):
    """Spacing of the noise levels, by the field that asks for it; TIMESTEPS takes them from the timesteps."""

    TIMESTEPS = ""
    KARRAS = "use_karras_sigmas"
    EXPONENTIAL = "use_exponential_sigmas"
    UNIFORM_LAMBDA = "use_lu_lambdas"
    FLOW = "use_flow_sigmas"


class FinalSigma(Enum):
    """Noise level after the last step: none, or the lowest of the training."""

    ZERO = "zero"
    SIGMA_MIN = "sigma_min"


def read_sigma_spacing(fields: ScheduleFields, *extra: SigmaSpacing) -> SigmaSpacing:
    """Return the spacing of noise levels that a configuration asks for.

    Args:
        fields: the fields of the configuration.
        extra: spacings that the class reads besides Karras and exponential.

    Raises:
        ModelError: Two spacings are asked for, or beta sigmas, which need scipy.
    """
    if fields.read_flag("use_beta_sigmas"):
        raise fields.refuse("use_beta_sigmas", "beta sigmas need scipy and are not computed; set it to false")
    spacings = (SigmaSpacing.KARRAS, SigmaSpacing.EXPONENTIAL, *extra)
    requested = [spacing for spacing in spacings if fields.read_flag(spacing.value)]
    if len(requested) > 1:
        raise fields.refuse(requested[1].value, f"excludes {requested[0].value}; set one of them to false")
    return requested[0] if requested else SigmaSpacing.TIMESTEPS


def space_timesteps(spacing: Spacing, steps: int, timesteps: int, offset: int) -> np.ndarray:
    """Return the inference timesteps in descending order: float64 [steps], whole numbers unless linspace.

    Args:
        spacing: placement of the timesteps.
        steps: number of inference timesteps, at most `timesteps`.
        timesteps: number of training timesteps.
        offset: number added to the timesteps of "leading".

    Raises:
        ModelError: The offset leads beyond the last training timestep.
    """
    if spacing is Spacing.LINSPACE:
        return np.linspace(0, timesteps - 1, steps)[::-1]
    if spacing is Spacing.LEADING:
        spaced = (np.arange(steps) * (timesteps // steps))[::-1] + float(offset)
        check_last_timestep(spaced, timesteps, offset)
        return spaced
    return space_trailing(timesteps, timesteps / steps)[:steps]


def space_trailing(last: int, distance: float) -> np.ndarray:
    """Return whole timesteps that go down from `last - 1` by a distance.

    A sum of rounded distances can end just above zero. The timestep -1 that then follows is left out.
    """
    spaced = np.arange(last, 0, -distance).round() - 1
    return spaced[spaced >= 0]


def check_last_timestep(timesteps: np.ndarray, training_timesteps: int, offset: int) -> None:
    """Check that the first of the descending timesteps is one of the training's.

    Raises:
        ModelError: The offset leads beyond the last training timestep.
    """
    if timesteps[0] >= training_timesteps:
        raise ModelError(
            f"steps_offset {offset} leads to timestep {timesteps[0]:g}, beyond the last of training, "
            f"{training_timesteps - 1}; use fewer steps",
            CODE,
        )


def space_karras(highest: float, lowest: float, steps: int) -> np.ndarray:
    """Return noise levels whose 7th roots are evenly spaced, float64 [steps], descending."""
    ramp = np.linspace(0, 1, steps)
    first, last = highest ** (1 / RHO), lowest ** (1 / RHO)
    return np.asarray((first + ramp * (last - first)) ** RHO)


def space_exponentially(highest: float, lowest: float, steps: int) -> np.ndarray:
    """Return noise levels whose logarithms are evenly spaced, float64 [steps], descending."""
    return np.exp(np.linspace(math.log(highest), math.log(lowest), steps))


def space_sigmas(spacing: SigmaSpacing, highest: float, lowest: float, steps: int) -> np.ndarray:
    """Return noise levels in Karras or exponential spacing, float64 [steps], descending from `highest` to `lowest`."""
    respace = space_karras if spacing is SigmaSpacing.KARRAS else space_exponentially
    return respace(highest, lowest, steps)


def find_timesteps(sigmas: np.ndarray, training_sigmas: np.ndarray) -> np.ndarray:
    """Return the fractional training timesteps that have some noise levels, float64.

    The logarithm of the noise level is interpolated linearly between training timesteps, and not extrapolated.
    """
    logs = np.log(training_sigmas)
    # The last index whose level is not above sigma. Rescaling to zero SNR can leave the last level below its neighbour.
    lowest_after = np.minimum.accumulate(logs[::-1])[::-1]
    log_sigmas = np.log(np.maximum(sigmas, 1e-10))
    low = (np.searchsorted(lowest_after, log_sigmas, side="right") - 1).clip(0, len(logs) - 2)
    weights = ((logs[low] - log_sigmas) / (logs[low] - logs[low + 1])).clip(0, 1)
    return (1 - weights) * low + weights * (low + 1)

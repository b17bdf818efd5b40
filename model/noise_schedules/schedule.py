"""Interface of the noise schedules: a schedule plans a trajectory, and steps images along it.

A runner draws Gaussian noise for each image, multiplies it by `Trajectory.initial_scale`, and makes these calls:

    state = ()
    for index, timestep in enumerate(trajectory.timesteps):
        output = model(schedule.scale_input(trajectory, index, images), timestep)
        noise = draw() if schedule.needs_noise(trajectory, index) else None
        state, images = schedule.step(trajectory, state, index, output, images, noise)

Schedules and trajectories never change, and `step` keeps nothing, so a batch equals its images alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.errors import ModelError
from model.noise_schedules.predictions import split_variance

State = tuple[np.ndarray, ...]
"""Arrays that a solver carries from pass to pass, shaped like the images; () before the first pass."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Passes of the model that denoise an image. The arrays are read-only.

    timesteps      timestep that the model receives in each pass, [passes] int64 or float32
    sigmas         noise levels in the measure of the schedule before each pass and after the last, [passes + 1] float32
    initial_scale  factor of the Gaussian noise that the first pass starts from
    """

    timesteps: np.ndarray
    sigmas: np.ndarray
    initial_scale: float = 1.0

    def __post_init__(self) -> None:
        for array in (self.timesteps, self.sigmas):
            array.setflags(write=False)

    @property
    def passes(self) -> int:
        """Number of evaluations of the model."""
        return len(self.timesteps)


@dataclass(frozen=True, eq=False)
class Pass:
    """Inputs of one step after a pass of the model; all arrays have one dtype, float32 or float64.

    output    prediction of the model, shaped like the images
    variance  learned variance, the second half of the model's channels; None if the model returns none
    images    noisy images before scaling
    noise     Gaussian noise where the schedule needs it, otherwise None
    """

    trajectory: Trajectory
    state: State
    index: int
    output: np.ndarray
    variance: np.ndarray | None
    images: np.ndarray
    noise: np.ndarray | None

    @property
    def sigma(self) -> Any:
        """Noise level before the pass as a scalar of the images' dtype, so that products keep the dtype."""
        return self.images.dtype.type(self.trajectory.sigmas[self.index])

    @property
    def next_sigma(self) -> Any:
        """Noise level after the pass as a scalar of the images' dtype."""
        return self.images.dtype.type(self.trajectory.sigmas[self.index + 1])


@dataclass(frozen=True, eq=False)
class NoiseSchedule(ABC):
    """Sampler of one diffusers class with its configuration.

    Images are [images, channels, ...]. They are computed in float32, or in float64 if `images` is float64.
    """

    @property
    @abstractmethod
    def most_steps(self) -> int:
        """Largest number of steps: the number of training timesteps."""

    @property
    def passes_per_step(self) -> int:
        """Evaluations of the model in each step but the last, which takes one."""
        return 1

    @property
    def takes_sigmas(self) -> bool:
        """Whether `plan` takes noise levels: those of a flow."""
        return False

    def plan(
        self, steps: int, tokens: int | None = None, sigmas: Sequence[float] | None = None
    ) -> Trajectory:
        """Return the trajectory of a number of steps.

        Args:
            steps: number of solver steps.
            tokens: number of image tokens; needed and used for dynamic shifting only.
            sigmas: noise levels of a flow before its shift, one for each step; None for evenly spaced ones.

        Raises:
            ModelError: `steps` is no whole number from 1 to `most_steps`, or the configuration cannot be planned
                with these arguments.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= self.most_steps:
            raise ModelError(
                f"steps {steps!r:.60} must be a whole number from 1 to the number of training timesteps, "
                f"{self.most_steps}"
            )
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise ModelError(f"tokens {tokens!r:.60} must be a positive whole number of image tokens")
        if sigmas is not None and not self.takes_sigmas:
            raise ModelError(
                "sigmas are for flow matching; this schedule takes its own from the configuration"
            )
        return self._plan(steps, tokens, None if sigmas is None else check_sigmas(sigmas, steps))

    @abstractmethod
    def _plan(self, steps: int, tokens: int | None, sigmas: np.ndarray | None) -> Trajectory:
        """Return the trajectory of `plan`, whose arguments are checked; sigmas are float32 [steps]."""

    def scale_input(self, trajectory: Trajectory, index: int, images: np.ndarray) -> np.ndarray:
        """Return what the model receives in a pass for the noisy images."""
        return images

    def needs_noise(self, trajectory: Trajectory, index: int) -> bool:
        """Return whether `step` needs fresh Gaussian noise in a pass."""
        return False

    def step(
        self,
        trajectory: Trajectory,
        state: State,
        index: int,
        model_output: np.ndarray,
        images: np.ndarray,
        noise: np.ndarray | None = None,
    ) -> tuple[State, np.ndarray]:
        """Return the state and the images after a pass of the model.

        Args:
            trajectory: result of `plan`.
            state: result of the pass before; () in the first pass.
            index: index of the pass.
            model_output: output of the model, shaped like the images or with twice their channels. The second half is
                a learned variance, which only DDPM with a learned variance reads.
            images: noisy images before scaling, [images, channels, ...].
            noise: Gaussian noise shaped like the images, if `needs_noise` asks for it.

        Raises:
            ModelError: The index is not one of the trajectory, a shape does not fit, or noise is missing.
        """
        if not 0 <= index < trajectory.passes:
            raise ModelError(f"pass {index} is not one of the trajectory's 0 to {trajectory.passes - 1}")
        dtype = np.dtype(np.float64 if images.dtype == np.float64 else np.float32)
        images = images.astype(dtype, copy=False)
        output, variance = split_variance(model_output.astype(dtype, copy=False), images)
        if self.needs_noise(trajectory, index):
            if noise is None or noise.shape != images.shape:
                shape = "no noise" if noise is None else f"noise of shape {list(noise.shape)}"
                raise ModelError(
                    f"pass {index} needs noise of shape {list(images.shape)}; it was given {shape}"
                )
            noise = noise.astype(dtype, copy=False)
        else:
            noise = None
        return self._step(Pass(trajectory, state, index, output, variance, images, noise))

    @abstractmethod
    def _step(self, model_pass: Pass) -> tuple[State, np.ndarray]:
        """Return the state and the images after a pass."""

    @abstractmethod
    def find_scales(self, trajectory: Trajectory, index: int) -> tuple[np.float32, np.float32]:
        """Return the scales of clean image and noise that make up the noisy image before a pass."""

    def add_noise(
        self, trajectory: Trajectory, index: int, clean: np.ndarray, noise: np.ndarray
    ) -> np.ndarray:
        """Return clean images with the noise that images have before a pass, to start there (image to image)."""
        signal, deviation = self.find_scales(trajectory, index)
        return signal * clean + deviation * noise


def check_sigmas(sigmas: Sequence[float], steps: int) -> np.ndarray:
    """Return the noise levels of a flow as float32 [steps].

    Raises:
        ModelError: They are not `steps` descending numbers, above 0 and at most 1.
    """
    try:
        levels = np.asarray(sigmas, np.float32)
    except (TypeError, ValueError):
        levels = np.empty(0, np.float32)
    is_valid = levels.shape == (steps,) and levels[0] <= 1 and levels[-1] > 0 and (np.diff(levels) < 0).all()
    if not is_valid:
        raise ModelError(
            f"sigmas must be {steps} descending numbers, above 0 and at most 1, one for each step"
        )
    return levels

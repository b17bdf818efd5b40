"""Passes of Heun's method: each step but the last has a predictor and a corrector.

N steps take 2N - 1 passes. Passes with even indices are predictors, odd ones correctors at the noise level that the
predictor has reached. The state between them has the predictor's derivative and the images before it.
"""

from __future__ import annotations

import numpy as np

from model.errors import ModelError
from model.noise_schedules.schedule import Pass, State


def repeat_for_passes(timesteps: np.ndarray, sigmas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the timesteps [2N - 1] and noise levels [2N] of the passes of N steps.

    Args:
        timesteps: timesteps of the steps, [N].
        sigmas: noise levels of the steps and the last one, [N + 1].
    """
    inner = sigmas[1:-1].repeat(2)
    return (
        np.concatenate([timesteps[:1], timesteps[1:].repeat(2)]),
        np.concatenate([sigmas[:1], inner, sigmas[-1:]]),
    )


def step_along(model_pass: Pass, derivative: np.ndarray) -> tuple[State, np.ndarray]:
    """Return the state and the images after a pass.

    Args:
        model_pass: inputs of the pass.
        derivative: derivative of the images by sigma before the pass.

    Raises:
        ModelError: The pass is a corrector and the state is not that of a predictor.
    """
    index, images = model_pass.index, model_pass.images
    if index % 2 == 0:
        step = model_pass.next_sigma - model_pass.sigma
        return (derivative, images), images + derivative * step
    if len(model_pass.state) != 2:
        raise ModelError(f"pass {index} is the second of its step; start at pass {index - 1} or {index + 1}")
    first_derivative, images = model_pass.state
    step = model_pass.sigma - images.dtype.type(model_pass.trajectory.sigmas[index - 1])
    return (), images + (first_derivative + derivative) / images.dtype.type(2) * step

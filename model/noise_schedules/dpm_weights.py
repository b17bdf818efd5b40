"""Weights of a step of DPM-Solver: of the images, of the predictions of the last passes, and of the noise.

A prediction is a polynomial in lambda through the last passes. Its terms are integrated against the exponential that
the algorithm has in front of the prediction. The quadratic term of order 3 has half of its weight in diffusers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Algorithm(Enum):
    """Differential equation that is solved, by its diffusers name."""

    CLEAN = "dpmsolver++"
    NOISE = "dpmsolver"
    STOCHASTIC_CLEAN = "sde-dpmsolver++"
    STOCHASTIC_NOISE = "sde-dpmsolver"

    @property
    def is_stochastic(self) -> bool:
        """Whether each step adds noise."""
        return self in (Algorithm.STOCHASTIC_CLEAN, Algorithm.STOCHASTIC_NOISE)

    @property
    def integrates_clean(self) -> bool:
        """Whether the prediction is the clean image and not the noise."""
        return self in (Algorithm.CLEAN, Algorithm.STOCHASTIC_CLEAN)


class SolverType(Enum):
    """Weight of the slope in a step of order 2: at the middle of the step, or integrated."""

    MIDPOINT = "midpoint"
    HEUN = "heun"


@dataclass(frozen=True)
class Weights:
    """Factors of the terms whose sum is the next images.

    images       factor of the noisy images
    predictions  factors of the predictions, the newest first
    noise        factor of the fresh noise; 0 without noise
    """

    images: float
    predictions: tuple[float, ...]
    noise: float


def find_lambda(signal: float, noise: float) -> float:
    """Return the logarithm of signal / noise; infinity without noise."""
    return math.log(signal) - math.log(noise) if noise > 0 else math.inf


def find_weights(
    algorithm: Algorithm,
    solver_type: SolverType,
    scales: Sequence[tuple[float, float]],
    exact_curvature: bool = False,
) -> Weights:
    """Return the weights of a step whose order is the number of predictions.

    Args:
        algorithm: differential equation.
        solver_type: weight of the slope in order 2.
        scales: scales of clean image and noise at the passes of the predictions, the oldest first, and after the step.
        exact_curvature: whether the curvature of order 3 has its exact weight and not half of it.
    """
    *lambdas, target = (find_lambda(*pair) for pair in scales)
    signal, noise = (float(scale) for scale in scales[-1])
    signal_before, noise_before = (float(scale) for scale in scales[-2])
    step = target - lambdas[-1]
    # A stochastic step runs twice as far in the exponent, because the noise that it adds doubles the drift.
    rate = 2 if algorithm.is_stochastic else 1
    if algorithm.integrates_clean:
        exponent, scale = -rate * step, signal
        images = noise / noise_before * math.exp(-step if algorithm.is_stochastic else 0.0)
        variance = -math.expm1(-2 * step)
    else:
        exponent, scale = step, rate * noise
        images = signal / signal_before
        variance = math.expm1(2 * step)
    moments = integrate_powers(exponent, len(lambdas))
    if len(lambdas) == 2 and solver_type is SolverType.MIDPOINT:
        moments[1] = moments[0] / 2
    if len(lambdas) == 3 and exact_curvature:
        moments[2] *= 2
    predictions = expand_differences([-scale * moment for moment in moments], lambdas, step)
    return Weights(images, predictions, noise * math.sqrt(variance) if algorithm.is_stochastic else 0.0)


def integrate_powers(exponent: float, count: int) -> list[float]:
    """Return the integrals of exponent x e^(exponent x (1 - u)) u^k / k! over u from 0 to 1, for k below `count`."""
    moments = [math.expm1(exponent)]
    for power in range(1, count):
        moments.append(moments[-1] / exponent - 1 / math.factorial(power))
    return moments


def expand_differences(moments: Sequence[float], lambdas: Sequence[float], step: float) -> tuple[float, ...]:
    """Return the weights of the predictions, the newest first, from those of their scaled derivatives.

    Args:
        moments: weights of the prediction, of its slope times the step, and of its second divided difference times the
            square of the step.
        lambdas: lambdas of the predictions, the oldest first.
        step: difference of lambda in the step.
    """
    if len(lambdas) == 1:
        return (moments[0],)
    newest = step / (lambdas[-1] - lambdas[-2])
    if len(lambdas) == 2:
        return moments[0] + moments[1] * newest, -moments[1] * newest
    older = step / (lambdas[-2] - lambdas[-3])
    ratio = 1 / newest / (1 / newest + 1 / older)
    slope = (newest * (1 + ratio), -newest * (1 + ratio) - older * ratio, older * ratio)
    scale = 1 / (1 / newest + 1 / older)
    curvature = (newest * scale, -(newest + older) * scale, older * scale)
    constant = (1.0, 0.0, 0.0)
    predictions = zip(constant, slope, curvature)
    return tuple(sum(m * term for m, term in zip(moments, terms)) for terms in predictions)

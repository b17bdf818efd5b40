"""Regularised robust least squares for the changes of numbers that explain ratios of times.

r = J x + e: r are the logarithms of measured over predicted times, x those of changed over recorded numbers,
J the elasticities of the predicted times: relative growth of a time over relative growth of a number. All logarithms
are natural. The errors e have a Student distribution with 3 degrees of freedom.
Its weight decreases for outliers, so that no outlier decides anything. A change costs (x / likely)^2, so
numbers that the vendor documents move last.

Numbers enter in sequence, by their gain without the kernel that gains most: a number supported by a single
kernel may be an error of that kernel. The extended Bayesian information criterion (Chen and Chen, Biometrika
95, 2008) decides how many numbers stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST = 4
"""Least number of measurements that distinguishes a wrong number from an outlier."""
DEPENDS = 0.02
"""Least elasticity with which a kernel's time depends on a number."""
_FREEDOM = 3.0  # degrees of freedom of the Student distribution
_LEAST_SCALE = 0.002  # times repeat no better, so smaller contradictions are ignored
_SCALES = np.geomspace(_LEAST_SCALE, 1.0, 32)
_MOST_NUMBERS = 8
_MOST_STEPS = 40  # most steps of reweighted least squares
_LOOK_AHEAD = 2  # numbers tried after the best set: two may explain what a single number does not
_ALIKE = 6.0  # difference of costs, odds of 1 to 20, up to which an alternative cannot be ruled out
_FAR = 5.0  # distance of an outlier from the fit, in scales
_NOTICED = math.log(1.15)  # least distance of an outlier: 15 %


@dataclass(frozen=True)
class Problem:
    """Ratios of times and the numbers on which they may depend.

    `ratios` are log(measured / predicted) by kernel [kernels]. `elasticities` are [kernels, numbers]. `spreads` are the
    standard deviations of the measured times over these times [kernels]. `likely` is the standard deviation of each
    number's change before any measurement, `most` its largest change, both logarithms [numbers].
    """

    ratios: np.ndarray
    elasticities: np.ndarray
    spreads: np.ndarray
    likely: np.ndarray
    most: np.ndarray


@dataclass(frozen=True)
class Solution:
    """Numbers whose changes explain the ratios, as columns of `Problem.elasticities`, with their changes.

    `changes` and their standard `errors` are logarithms. `instead` lists for each number the numbers that explain the
    times nearly as well in its place. `outliers` are indices of kernels that no change explains. `scale` is the scale
    of the remaining errors, relative to the times.
    """

    numbers: tuple[int, ...]
    changes: np.ndarray
    errors: np.ndarray
    instead: tuple[tuple[int, ...], ...]
    outliers: tuple[int, ...]
    scale: float


@dataclass(frozen=True)
class _Fit:
    """A set of numbers with their changes, and how well these explain the ratios.

    `costs` has the cost of each kernel, -2 times its log likelihood up to a constant. `total` is their sum plus the
    cost of the changes. `scale` is the scale of the errors that minimises the costs.
    """

    numbers: tuple[int, ...]
    changes: np.ndarray
    costs: np.ndarray
    total: float
    scale: float


def solve(problem: Problem, lenient: bool = False) -> Solution:
    """Find the numbers, at most eight, whose changes explain the ratios of at least `FEWEST` kernels.

    Args:
        problem: The ratios and elasticities.
        lenient: Whether numbers enter for a smaller gain. Suits elasticities that are inexact over the range of the
            changes.

    Returns:
        The solution, without any number if none explains enough.
    """
    kernels, numbers = problem.elasticities.shape
    fit = _fit_numbers(problem, ())
    path = best_path = [fit]
    penalty = math.log(kernels) + (0.0 if lenient else 2.0 * math.log(max(numbers, 2)))
    while len(fit.numbers) < min(_MOST_NUMBERS, kernels // 3) and len(path) - len(best_path) < _LOOK_AHEAD:
        previous = fit
        fits = [
            _fit_numbers(problem, (*fit.numbers, number), fit)
            for number in _list_supported(problem, fit.numbers)
        ]
        if not fits:
            break
        fit = _exchange_numbers(problem, max(fits, key=lambda after: _robust_gain(previous, after)))
        path = [*path, fit]
        if fit.total + penalty * (len(path) - len(best_path)) < best_path[-1].total:
            best_path = path
    fit = _prune_numbers(problem, best_path[-1], penalty)
    numbers_in_fit = fit.numbers
    residuals = problem.ratios - problem.elasticities[:, numbers_in_fit] @ fit.changes
    outlier_distance = np.hypot(fit.scale, problem.spreads) * _FAR
    outliers = np.flatnonzero((np.abs(residuals) > outlier_distance) & (np.abs(residuals) > _NOTICED))
    return Solution(
        numbers_in_fit,
        fit.changes,
        _estimate_errors(problem, fit, residuals),
        tuple(_find_alternatives(problem, fit, index) for index in range(len(numbers_in_fit))),
        tuple(map(int, outliers)),
        fit.scale,
    )


def _list_supported(problem: Problem, taken: Sequence[int]) -> list[int]:
    """Return the numbers on which at least two kernels depend, without those in `taken`."""
    has_support = (np.abs(problem.elasticities) >= DEPENDS).sum(axis=0) >= 2
    return [int(index) for index in np.flatnonzero(has_support) if index not in taken]


def _robust_gain(before: _Fit, after: _Fit) -> float:
    """Return the decrease of the total cost from one fit to another, without the gain of the kernel that gains most."""
    gains = before.costs - after.costs
    change = before.total - after.total
    return float(change - max(gains.max(), 0.0))


def _exchange_numbers(problem: Problem, fit: _Fit) -> _Fit:
    """Return a fit with as many numbers, some of them exchanged one by one while that lowers the total cost."""
    for _ in range(_MOST_NUMBERS):
        fits = [fit]
        for removed in fit.numbers:
            reduced = _fit_numbers(problem, tuple(number for number in fit.numbers if number != removed), fit)
            fits += [
                _fit_numbers(problem, (*reduced.numbers, number), reduced)
                for number in _list_supported(problem, fit.numbers)
            ]
        cheapest = min(fits, key=lambda fit: fit.total)
        if cheapest.total > fit.total - 1e-6:
            break
        fit = cheapest
    return fit


def _prune_numbers(problem: Problem, fit: _Fit, penalty: float) -> _Fit:
    """Return a fit without the numbers whose robust gain is below the penalty, removed one by one, least gain first."""
    while fit.numbers:
        reduced_fits = [
            _fit_numbers(problem, tuple(number for number in fit.numbers if number != removed), fit)
            for removed in fit.numbers
        ]
        cheapest = min(reduced_fits, key=lambda reduced: _robust_gain(reduced, fit))
        if _robust_gain(cheapest, fit) >= penalty:
            break
        fit = cheapest
    return fit


def _fit_numbers(problem: Problem, numbers: tuple[int, ...], start: _Fit | None = None) -> _Fit:
    """Fit the changes of some numbers, all others unchanged, and return the fit of lowest total cost.

    Args:
        problem: The ratios and elasticities.
        numbers: The numbers to change.
        start: A fit whose changes are a starting point. If it lacks the last number, further starts give this number
            the changes that would explain the remaining ratio of a single kernel.
    """
    start_changes = dict(zip(start.numbers, start.changes)) if start is not None else {}
    initial = np.array([start_changes.get(number, 0.0) for number in numbers])
    if not numbers:
        return _evaluate(problem, numbers, initial)
    starts = [initial]
    if numbers[-1] not in start_changes:
        matrix = problem.elasticities[:, numbers]
        column = matrix[:, -1]
        residuals = problem.ratios - matrix @ initial
        is_dependent = np.abs(column) >= DEPENDS
        candidates = np.clip(
            residuals[is_dependent] / column[is_dependent],
            -problem.most[numbers[-1]],
            problem.most[numbers[-1]],
        )
        fits = [
            _evaluate(problem, numbers, np.append(initial[:-1], candidate))
            for candidate in np.unique(candidates.round(4))
        ]
        starts += [fit.changes for fit in sorted(fits, key=lambda fit: fit.total)[:2]]
    return min((_descend(problem, numbers, begin) for begin in starts), key=lambda fit: fit.total)


def _descend(problem: Problem, numbers: tuple[int, ...], changes: np.ndarray) -> _Fit:
    """Return the fit to which reweighted least squares leads, starting from `changes` of `numbers`.

    Each change stays from -log(100) to `Problem.most`. Ends when the total cost no longer decreases.
    """
    matrix, prior = problem.elasticities[:, numbers], 1.0 / problem.likely[list(numbers)] ** 2
    largest = problem.most[list(numbers)]
    fit = _evaluate(problem, numbers, changes)
    for _ in range(_MOST_STEPS):
        weights = _compute_weights(problem, fit)
        normal_matrix = matrix.T @ (weights[:, None] * matrix) + np.diag(prior)
        step = np.linalg.solve(normal_matrix, matrix.T @ (weights * problem.ratios))
        next_fit = _evaluate(problem, numbers, np.clip(step, -math.log(100.0), largest))
        if next_fit.total > fit.total - 1e-6:
            break
        fit = next_fit
    return fit


def _compute_weights(problem: Problem, fit: _Fit) -> np.ndarray:
    """Return the weight of each kernel in the least squares at a fit; the larger its error, the lower its weight."""
    residuals = problem.ratios - problem.elasticities[:, fit.numbers] @ fit.changes
    return (_FREEDOM + 1.0) / (_FREEDOM * (fit.scale**2 + problem.spreads**2) + residuals**2)


def _evaluate(problem: Problem, numbers: tuple[int, ...], changes: np.ndarray) -> _Fit:
    """Return the fit with exactly these changes, whose costs are at the scale of errors that minimises them."""
    residuals = problem.ratios - problem.elasticities[:, numbers] @ changes
    squares = _SCALES[:, None] ** 2 + problem.spreads**2
    costs = (_FREEDOM + 1.0) * np.log1p(residuals**2 / (_FREEDOM * squares)) + np.log(squares)
    scale_index = int(np.argmin(costs.sum(axis=1)))
    change_cost = float(((changes / problem.likely[list(numbers)]) ** 2).sum()) if numbers else 0.0
    return _Fit(
        numbers,
        changes,
        costs[scale_index],
        float(costs[scale_index].sum()) + change_cost,
        float(_SCALES[scale_index]),
    )


def _estimate_errors(problem: Problem, fit: _Fit, residuals: np.ndarray) -> np.ndarray:
    """Return the standard errors of the changes of a fit, from the curvature of its cost; empty without numbers."""
    if not fit.numbers:
        return np.zeros(0)
    matrix = problem.elasticities[:, fit.numbers]
    normal_matrix = matrix.T @ (_compute_weights(problem, fit)[:, None] * matrix)
    normal_matrix += np.diag(1.0 / problem.likely[list(fit.numbers)] ** 2)
    return np.sqrt(np.diag(np.linalg.inv(normal_matrix)))


def _find_alternatives(problem: Problem, fit: _Fit, index: int) -> tuple[int, ...]:
    """Return the numbers, best first, that explain the times nearly as well as the fit's number at `index`.

    Each takes the place of that number, while the other numbers of the fit stay.
    """
    remaining = tuple(entry for number, entry in enumerate(fit.numbers) if number != index)
    reduced = _fit_numbers(problem, remaining, fit)
    fits = [
        _fit_numbers(problem, (*remaining, number), reduced)
        for number in _list_supported(problem, fit.numbers)
    ]
    alternatives = [near for near in fits if near.costs.sum() <= fit.costs.sum() + _ALIKE]
    alternatives.sort(key=lambda fit: fit.total)
    return tuple(fit.numbers[-1] for fit in alternatives)

"""Which changes of numbers explain ratios of times, by a regularised robust least squares.

r = J x + e: r are the logarithms of measured over predicted times, x those of the changed over the recorded numbers, J
the elasticities of the predicted times. Errors e have a Student distribution of 3 degrees of freedom, whose weight on a
wild value falls off: no kernel far off the others decides anything. A change costs (x / likely)^2, so numbers that the
vendor states move last. Numbers are taken in one by one, by what they gain once the kernel that gains most is left out:
what only one kernel says may be that kernel's fault. The extended Bayesian information criterion (Chen and Chen,
Biometrika 95, 2008) decides how many are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST = 4
"""Measurements below which no number can be told from an outlier."""
DEPENDS = 0.02
"""The least elasticity with which a kernel's time says something of a number."""
_FREEDOM = 3.0  # of the Student distribution
_LEAST_SCALE = 0.002  # times repeat no better, so a smaller contradiction is none
_SCALES = np.geomspace(_LEAST_SCALE, 1.0, 32)
_MOST_NUMBERS = 8
_MOST_STEPS = 40  # of reweighted least squares
_LOOK_AHEAD = 2  # numbers beyond the best so far: two may explain what one does not
_ALIKE = 6.0  # in the criterion: what explains times nearly as well, odds of 1 to 20, cannot be ruled out
_FAR = 5.0  # scales off the fit: an outlier
_NOTICED = math.log(1.15)  # and at least 15 %


@dataclass(frozen=True)
class Problem:
    """Ratios of times and what they may depend on.

    ratios: log(measured / predicted), one per kernel. elasticities: kernels by numbers. spreads: relative, of each
    time. likely: the standard deviation of each number's change, as a logarithm. most: its largest.
    """

    ratios: np.ndarray
    elasticities: np.ndarray
    spreads: np.ndarray
    likely: np.ndarray
    most: np.ndarray


@dataclass(frozen=True)
class Found:
    """The numbers that changed, by their places: by how much, how sure that is, and what could stand in for each.

    errors: standard errors of the changes. instead: for each number those others that explain the times nearly as well.
    outliers: places of kernels that no change explains. scale: of the errors that are left.
    """

    numbers: tuple[int, ...]
    changes: np.ndarray
    errors: np.ndarray
    instead: tuple[tuple[int, ...], ...]
    outliers: tuple[int, ...]
    scale: float


@dataclass(frozen=True)
class _Fit:
    """A set of numbers with their best changes; `costs` are those of the kernels, `total` counts the changes too."""

    numbers: tuple[int, ...]
    changes: np.ndarray
    costs: np.ndarray
    total: float
    scale: float


def solve(problem: Problem, lenient: bool = False) -> Found:
    """The changes that the ratios call for. There are at least `FEWEST` kernels.

    lenient: a number is taken in for less, which suits elasticities that do not hold as far as the changes reach.
    """
    kernels, numbers = problem.elasticities.shape
    fit = _fitted(problem, ())
    path = best = [fit]
    price = math.log(kernels) + (0.0 if lenient else 2.0 * math.log(max(numbers, 2)))
    while len(fit.numbers) < min(_MOST_NUMBERS, kernels // 3) and len(path) - len(best) < _LOOK_AHEAD:
        before = fit
        tried = [_fitted(problem, (*fit.numbers, each), fit) for each in _free(problem, fit.numbers)]
        if not tried:
            break
        fit = _exchanged(problem, max(tried, key=lambda each: _gain(before, each)))
        path = [*path, fit]
        if fit.total + price * (len(path) - len(best)) < best[-1].total:
            best = path
    fit = _pruned(problem, best[-1], price)
    chosen = fit.numbers
    residuals = problem.ratios - problem.elasticities[:, chosen] @ fit.changes
    far = np.hypot(fit.scale, problem.spreads) * _FAR
    outliers = np.flatnonzero((np.abs(residuals) > far) & (np.abs(residuals) > _NOTICED))
    return Found(
        chosen,
        fit.changes,
        _errors(problem, fit, residuals),
        tuple(_instead(problem, fit, place) for place in range(len(chosen))),
        tuple(map(int, outliers)),
        fit.scale,
    )


def _free(problem: Problem, taken: Sequence[int]) -> list[int]:
    """Numbers that at least two kernels depend on."""
    enough = (np.abs(problem.elasticities) >= DEPENDS).sum(axis=0) >= 2
    return [int(each) for each in np.flatnonzero(enough) if each not in taken]


def _gain(before: _Fit, after: _Fit) -> float:
    """What the costs fall by without the kernel whose own falls most."""
    gains = before.costs - after.costs
    change = before.total - after.total
    return float(change - max(gains.max(), 0.0))


def _exchanged(problem: Problem, fit: _Fit) -> _Fit:
    """The fit with numbers exchanged one by one for others, as long as that explains more."""
    for _ in range(_MOST_NUMBERS):
        tried = [fit]
        for left in fit.numbers:
            rest = _fitted(problem, tuple(each for each in fit.numbers if each != left), fit)
            tried += [_fitted(problem, (*rest.numbers, each), rest) for each in _free(problem, fit.numbers)]
        best = min(tried, key=lambda each: each.total)
        if best.total > fit.total - 1e-6:
            break
        fit = best
    return fit


def _pruned(problem: Problem, fit: _Fit, price: float) -> _Fit:
    """The fit without numbers whose gain does not outweigh their price."""
    while fit.numbers:
        without = [
            _fitted(problem, tuple(each for each in fit.numbers if each != left), fit) for left in fit.numbers
        ]
        least = min(without, key=lambda each: _gain(each, fit))
        if _gain(least, fit) >= price:
            break
        fit = least
    return fit


def _fitted(problem: Problem, numbers: tuple[int, ...], start: _Fit | None = None) -> _Fit:
    """The best changes of some numbers, from those of `start`, and from every value that explains one kernel."""
    known = dict(zip(start.numbers, start.changes)) if start is not None else {}
    begin = np.array([known.get(each, 0.0) for each in numbers])
    if not numbers:
        return _valued(problem, numbers, begin)
    starts = [begin]
    if numbers[-1] not in known:
        matrix = problem.elasticities[:, numbers]
        column = matrix[:, -1]
        left = problem.ratios - matrix @ begin
        heard = np.abs(column) >= DEPENDS
        values = np.clip(left[heard] / column[heard], -problem.most[numbers[-1]], problem.most[numbers[-1]])
        tried = [
            _valued(problem, numbers, np.append(begin[:-1], value)) for value in np.unique(values.round(4))
        ]
        starts += [each.changes for each in sorted(tried, key=lambda each: each.total)[:2]]
    return min((_descended(problem, numbers, each) for each in starts), key=lambda each: each.total)


def _descended(problem: Problem, numbers: tuple[int, ...], changes: np.ndarray) -> _Fit:
    """Reweighted least squares from a start, until it no longer gets better."""
    matrix, prior = problem.elasticities[:, numbers], 1.0 / problem.likely[list(numbers)] ** 2
    most = problem.most[list(numbers)]
    fit = _valued(problem, numbers, changes)
    for _ in range(_MOST_STEPS):
        weights = _weights(problem, fit)
        normal = matrix.T @ (weights[:, None] * matrix) + np.diag(prior)
        step = np.linalg.solve(normal, matrix.T @ (weights * problem.ratios))
        after = _valued(problem, numbers, np.clip(step, -math.log(100.0), most))
        if after.total > fit.total - 1e-6:
            break
        fit = after
    return fit


def _weights(problem: Problem, fit: _Fit) -> np.ndarray:
    left = problem.ratios - problem.elasticities[:, fit.numbers] @ fit.changes
    return (_FREEDOM + 1.0) / (_FREEDOM * (fit.scale**2 + problem.spreads**2) + left**2)


def _valued(problem: Problem, numbers: tuple[int, ...], changes: np.ndarray) -> _Fit:
    """The costs of changes, at the scale of errors that makes them least."""
    left = problem.ratios - problem.elasticities[:, numbers] @ changes
    squares = _SCALES[:, None] ** 2 + problem.spreads**2
    costs = (_FREEDOM + 1.0) * np.log1p(left**2 / (_FREEDOM * squares)) + np.log(squares)
    best = int(np.argmin(costs.sum(axis=1)))
    moved = float(((changes / problem.likely[list(numbers)]) ** 2).sum()) if numbers else 0.0
    return _Fit(numbers, changes, costs[best], float(costs[best].sum()) + moved, float(_SCALES[best]))


def _errors(problem: Problem, fit: _Fit, left: np.ndarray) -> np.ndarray:
    """Standard errors from the curvature at the solution."""
    if not fit.numbers:
        return np.zeros(0)
    matrix = problem.elasticities[:, fit.numbers]
    normal = matrix.T @ (_weights(problem, fit)[:, None] * matrix)
    normal += np.diag(1.0 / problem.likely[list(fit.numbers)] ** 2)
    return np.sqrt(np.diag(np.linalg.inv(normal)))


def _instead(problem: Problem, fit: _Fit, place: int) -> tuple[int, ...]:
    """The numbers that explain the times nearly as well as the one at `place` does."""
    rest = tuple(each for number, each in enumerate(fit.numbers) if number != place)
    without = _fitted(problem, rest, fit)
    tried = [_fitted(problem, (*rest, each), without) for each in _free(problem, fit.numbers)]
    near = [each for each in tried if each.costs.sum() <= fit.costs.sum() + _ALIKE]
    near.sort(key=lambda each: each.total)
    return tuple(each.numbers[-1] for each in near)

"""Comparison of a kernel's output with the truth, which names the worst element."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.testing.tolerance import tolerance


class Mismatch(AssertionError):
    """Error for an output that differs from the truth by more than its tolerance."""


class WeakComparison(UserWarning):
    """Warning of a comparison that a wrong output would pass too; users reported such tests that failed on a chip."""


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison of an output with the truth.

    Attributes:
        error: Largest absolute error; infinite where NaN or infinities differ.
        bound: Largest error that is allowed.
        worst: Index of the element with the largest error, empty for an empty array.
        seen: The output there.
        expected: The truth there.
        beyond: Number of elements whose error exceeds the bound.
        size: Number of elements.
        largest: Largest finite magnitude of the truth.
    """

    error: float
    bound: float
    worst: tuple[int, ...]
    seen: Any
    expected: Any
    beyond: int
    size: int
    largest: float

    @property
    def is_weak(self) -> bool:
        """Whether the bound is as large as the truth, so that zeros would pass."""
        return 0.0 < self.largest <= self.bound

    def __str__(self) -> str:
        return (
            f"error {self.error:.3g}, allowed {self.bound:.3g}; worst at {self.worst}: {self.seen:.9g} for "
            f"{self.expected:.9g}; {self.beyond} of {self.size} elements beyond"
        )


def compare(
    output: np.ndarray,
    truth: np.ndarray,
    magnitude: float | None = None,
    contraction: int = 0,
    roundings: int = 1,
    through: Any = None,
) -> Comparison:
    """Compare an output with the truth, which is worked out in float64.

    Integers and booleans must be equal; infinities and NaN must be at the same positions. Warns with
    WeakComparison if both sides have NaN, or if the bound is as large as the truth.

    Args:
        output: The output of the kernel.
        truth: The output of the reference.
        magnitude: Largest magnitude of the intermediate results; None for the largest finite magnitude of the
            truth.
        contraction: Number of products that one element sums in float32.
        roundings: Number of roundings on the longest path from input to output.
        through: Narrowest dtype of the roundings before the last; None for the output's dtype.

    Raises:
        Mismatch: The shapes differ, or an element is beyond the bound.
        InvalidArgument: `tolerance` refuses the arguments.
    """
    output, truth = np.asarray(output), np.asarray(truth)
    if output.shape != truth.shape:
        raise Mismatch(
            f"the output has shape {output.shape}, the reference {truth.shape}; both have to be equal"
        )
    wide, exact = output.astype(np.float64), truth.astype(np.float64)
    largest = float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0))
    if output.dtype.kind in "biu":
        bound = 0.0
    else:
        bound = tolerance(
            output.dtype, largest if magnitude is None else magnitude, contraction, roundings, through
        )
    with np.errstate(invalid="ignore"):
        errors = np.abs(wide - exact)
    same = (wide == exact) | (np.isnan(wide) & np.isnan(exact))
    errors = np.where(same, 0.0, np.where(np.isnan(errors), np.inf, errors))
    beyond = int(np.count_nonzero(errors > bound))
    worst = (
        tuple(int(i) for i in np.unravel_index(int(np.argmax(errors)), errors.shape)) if errors.size else ()
    )
    comparison = Comparison(
        float(errors.max(initial=0.0)),
        bound,
        worst,
        float(wide[worst]) if errors.size else 0.0,
        float(exact[worst]) if errors.size else 0.0,
        beyond,
        errors.size,
        largest,
    )
    if beyond:
        raise Mismatch(str(comparison))
    _warn_of_weakness(exact, comparison)
    return comparison


def _warn_of_weakness(truth: np.ndarray, comparison: Comparison) -> None:
    unknown = int(np.isnan(truth).sum())
    if unknown:
        warnings.warn(
            f"{unknown} of {truth.size} elements are NaN on both sides, which proves nothing of their values "
            "(a user report: fp8 results of NaN passed in simulation and were wrong on the chip)",
            WeakComparison,
            stacklevel=3,
        )
    if comparison.is_weak:
        warnings.warn(
            f"the allowed error {comparison.bound:.3g} is as large as the largest value, {comparison.largest:.3g}: "
            "zeros would pass (a user report: a tolerance wider than the reference passed in simulation)",
            WeakComparison,
            stacklevel=3,
        )

"""Calibration: predicts kernels with changed numbers, and finds the changes that explain measured times.

A number is a field of the hardware record, or an entry of a field that is a table (`Parameter`). A change is the
natural logarithm of a changed number over the recorded one. The elasticity of a predicted time by a number is the
relative growth of the time over the relative growth of the number: 1 if both double together, 0 if the number does not
matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nkw.errors import InvalidArgument, NkwError
from nkw.terminal import progress
from simulate.bundle.entries import Skipped
from simulate.calibrate.fit import DEPENDS, FEWEST, Problem, Solution, solve
from simulate.calibrate.measurement import Measurement
from simulate.calibrate.numbers import Parameter, change_record, list_parameters, make_overlay
from simulate.hardware import Hardware, hardware
from simulate.hardware.overlay import use_stand_in

_STEP = 0.05  # logarithmic change of a number for a finite difference, towards longer times
_SLIGHT = DEPENDS / 4.0
"""Elasticities below this are taken for 0."""
_MANY = 10_000
"""Number of instructions of a kernel from which numbers are first changed together."""
_ROUNDS = 6
_LENIENT = 2  # first rounds, in which numbers enter more easily
_SETTLED = 0.005  # largest logarithmic change between rounds that counts as converged


@dataclass(frozen=True)
class Contradiction:
    """A number that measured times contradict.

    `recorded` is its value in the record. `change` is the natural logarithm of the implied value over that, `error` its
    standard error. `kernels` counts the measured times that depend on the number. `before` and `after` are the medians
    of |predicted / measured - 1| of these times, by the record and with all changes. `instead` lists numbers that
    explain the times nearly as well; if it is empty, the number is determined.
    """

    number: Parameter
    recorded: float
    change: float
    error: float
    kernels: int
    before: float
    after: float
    instead: tuple[Parameter, ...]

    @property
    def determined(self) -> bool:
        """Whether no other number explains the times nearly as well."""
        return not self.instead

    @property
    def measured(self) -> float:
        """Value of the number that the measured times imply, in the unit of the record."""
        return self.recorded * math.exp(self.change)


@dataclass(frozen=True)
class Calibration:
    """Outcome of a calibration for a chip.

    `times_ns` has (measured, predicted by the record, predicted with all changes) for every kernel by name.
    `contradictions` are in descending order of change. `outliers` names kernels that no change explains. `undecided`
    lists numbers on which none of these times depends. `skipped` has the measurements that could not be predicted.
    """

    record: Hardware
    times_ns: Mapping[str, tuple[float, float, float]]
    contradictions: tuple[Contradiction, ...]
    outliers: tuple[str, ...]
    undecided: tuple[Parameter, ...]
    skipped: tuple[Skipped, ...]

    @property
    def median_errors(self) -> tuple[float, float]:
        """Medians over all kernels of |predicted / measured - 1|: by the record, and with all changes."""
        rows = np.array(list(self.times_ns.values()))
        return tuple(float(np.median(np.abs(rows[:, column] / rows[:, 0] - 1.0))) for column in (1, 2))  # type: ignore[return-value]

    def overlay(self, source: str) -> dict[str, dict[str, Any]]:
        """Return the overlay for this chip, by field: the determined numbers, and those of an overlay in use.

        Args:
            source: The source that the overlay gives for the determined numbers; their count of kernels is added.
        """
        determined = [contradiction for contradiction in self.contradictions if contradiction.determined]
        sources = {
            contradiction.number: f"{source}: {contradiction.kernels} kernels" for contradiction in determined
        }
        return make_overlay(
            self.record, {contradiction.number: contradiction.change for contradiction in determined}, sources
        )


def calibrate(target: str, measurements: Sequence[Measurement]) -> Calibration:
    """Find the numbers of a chip's record that measurements contradict.

    Launches every kernel dry once, and predicts it many times; shows progress on stderr.

    Args:
        target: The chip.
        measurements: Measured times of kernels on this chip.

    Raises:
        InvalidArgument: If fewer than four measurements can be predicted.
    """
    record = hardware(target)
    kernels, skipped = _select_usable(record, measurements)
    if len(kernels) < FEWEST:
        reasons = "; ".join(f"{skip.name}: {skip.why}" for skip in skipped[:3])
        raise InvalidArgument(
            "NKW-CALIBRATE",
            f"{len(kernels)} measured times of {target} can be used, and at least {FEWEST} tell a wrong number from an "
            "outlier; measure more kernels" + (f" (left out: {reasons})" if reasons else ""),
        )
    start = point = _Point.predict(record, {}, kernels)
    solution = _solve_changes(point, record, lenient=True)
    for round_index in range(_ROUNDS):
        changes = {
            point.numbers[index]: float(change) for index, change in zip(solution.numbers, solution.changes)
        }
        if _is_converged(point.changes, changes):
            break
        point = _Point.predict(record, changes, kernels, point)
        solution = _solve_changes(point, record, lenient=round_index < _LENIENT)
    return _make_calibration(record, start, point, solution, kernels, skipped)


def _select_usable(
    record: Hardware, measurements: Sequence[Measurement]
) -> tuple[list[Measurement], list[Skipped]]:
    """Return the measurements that can be predicted, and the others with the reasons; launches each kernel once.

    Any error of a kernel's launch, or a predicted time of 0, is a reason.
    """
    usable, skipped = [], []
    for measurement in measurements:
        try:
            if not measurement.predict(remember=True) > 0.0:
                skipped.append(Skipped(measurement.name, "its predicted time is 0"))
                continue
        except NkwError as refused:
            skipped.append(Skipped(measurement.name, refused.message))
        except Exception as failed:  # any error of the kernel's Python code
            skipped.append(Skipped(measurement.name, f"{type(failed).__name__}: {failed!s:.100}"))
        else:
            usable.append(measurement)
    return usable, skipped


@dataclass(frozen=True)
class _Point:
    """Predictions with a changed record: times and their elasticities, between which the solver interpolates.

    `changes` has the changes of numbers. `logs` are the natural logarithms of the predicted times in ns, by kernel.
    `rows` has the elasticities by number for each kernel, `elasticities` the same as [kernels, numbers] with 0 for
    absent ones, and `numbers` its columns.
    """

    changes: Mapping[Parameter, float]
    kernels: Sequence[Measurement]
    logs: np.ndarray
    rows: Sequence[Mapping[Parameter, float]]
    numbers: tuple[Parameter, ...]
    elasticities: np.ndarray

    @classmethod
    def predict(
        cls,
        record: Hardware,
        changes: Mapping[Parameter, float],
        kernels: Sequence[Measurement],
        previous: _Point | None = None,
    ) -> _Point:
        """Predict every kernel with changed numbers, and the elasticity of its time by each number.

        Args:
            record: The record of the chip.
            changes: The changes to apply to it.
            kernels: The measurements.
            previous: An earlier point. Where a kernel's elasticity was slight there, it counts as 0 here.
        """
        changed_record = change_record(record, changes)
        logs: list[float] = []
        rows: list[dict[Parameter, float]] = []
        for kernel_index, kernel in enumerate(progress(kernels, "calibration")):
            with use_stand_in(changed_record):
                log, numbers = math.log(kernel.predict(remember=True)), kernel.predict.list_numbers()
            idle_numbers = previous.find_idle_numbers(kernel_index) if previous is not None else set()

            def compute_growth(
                group: Sequence[Parameter], kernel: Measurement = kernel, log: float = log
            ) -> float:
                slower = {number: changes.get(number, 0.0) + number.slower * _STEP for number in group}
                with use_stand_in(change_record(record, {**changes, **slower})):
                    return (math.log(kernel.predict()) - log) / _STEP

            logs.append(log)
            candidates = [number for number in numbers if number not in idle_numbers]
            groups = (
                [candidates] if kernel.predict.instructions >= _MANY else [[number] for number in candidates]
            )
            rows.append(
                {
                    number: elasticity
                    for group in groups
                    for number, elasticity in find_elasticities(compute_growth, group).items()
                }
            )
        all_numbers = tuple(sorted({number for row in rows for number in row}))
        matrix = np.array([[row.get(number, 0.0) for number in all_numbers] for row in rows])
        return cls(changes, kernels, np.array(logs), rows, all_numbers, matrix)

    def find_idle_numbers(self, kernel_index: int) -> set[Parameter]:
        """Return the numbers by which the time of a kernel, given by its index, has an elasticity of nearly 0."""
        return {number for number, elasticity in self.rows[kernel_index].items() if abs(elasticity) < _SLIGHT}

    @property
    def ratios(self) -> np.ndarray:
        """Natural logarithms of measured over predicted times, by kernel."""
        return np.array([math.log(kernel.measured_ns) for kernel in self.kernels]) - self.logs


def find_elasticities(
    compute_growth: Callable[[Sequence[Parameter]], float], numbers: Sequence[Parameter]
) -> dict[Parameter, float]:
    """Return the elasticity of a kernel's time by each number; positive if a larger number takes longer.

    Several numbers are changed together first. If they make no difference, each has an elasticity of 0; else they are
    halved. This is right if no slower number makes the kernel faster. Only anomalies of the list scheduler do that, and
    they are small in long launches.

    Args:
        compute_growth: Returns the relative growth of the time over that of the numbers, if some of them get slower
            together.
        numbers: The numbers.
    """
    if not numbers:
        return {}
    together = compute_growth(numbers)
    if len(numbers) == 1:
        return {numbers[0]: together * numbers[0].slower}
    if abs(together) < _SLIGHT:
        return dict.fromkeys(numbers, 0.0)
    half = len(numbers) // 2
    return {
        **find_elasticities(compute_growth, numbers[:half]),
        **find_elasticities(compute_growth, numbers[half:]),
    }


def _solve_changes(point: _Point, record: Hardware, lenient: bool) -> Solution:
    """Solve for the changes of the record that explain all times, with the elasticities at a point.

    Args:
        point: The predictions.
        record: The record of the chip, without changes.
        lenient: Whether numbers enter more easily, see `solve`.
    """
    changes = np.array([point.changes.get(number, 0.0) for number in point.numbers])
    return solve(
        Problem(
            point.ratios + point.elasticities @ changes,
            point.elasticities,
            np.array([kernel.spread for kernel in point.kernels]),
            np.array([number.likely(record) for number in point.numbers]),
            np.array([number.most(record) for number in point.numbers]),
        ),
        lenient,
    )


def _is_converged(before: Mapping[Parameter, float], after: Mapping[Parameter, float]) -> bool:
    """Return whether two sets of changes have the same numbers, and no change differs by 0.005 or more."""
    return before.keys() == after.keys() and all(
        abs(after[number] - before[number]) < _SETTLED for number in after
    )


def _make_calibration(
    record: Hardware,
    first: _Point,
    last: _Point,
    solution: Solution,
    kernels: Sequence[Measurement],
    skipped: Sequence[Skipped],
) -> Calibration:
    """Return the calibration of a solution, with errors and predicted times before and after.

    Args:
        record: The record of the chip.
        first: The predictions by the record.
        last: The predictions from which the solution was computed.
        solution: The changes.
        kernels: The measurements that were used.
        skipped: The measurements that could not be predicted.
    """
    before, after = (np.abs(np.expm1(-point.ratios)) for point in (first, last))
    contradictions = []
    for index, change, error, instead in zip(
        solution.numbers, solution.changes, solution.errors, solution.instead
    ):
        is_dependent = np.abs(last.elasticities[:, index]) >= DEPENDS
        number = last.numbers[index]
        contradictions.append(
            Contradiction(
                number,
                number.value(record),
                float(change),
                float(error),
                int(is_dependent.sum()),
                float(np.median(before[is_dependent])),
                float(np.median(after[is_dependent])),
                tuple(last.numbers[index] for index in instead),
            )
        )
    decided = {
        last.numbers[index] for index in np.flatnonzero((np.abs(last.elasticities) >= DEPENDS).any(axis=0))
    }
    return Calibration(
        record,
        {
            kernel.name: (kernel.measured_ns, math.exp(first_log), math.exp(last_log))
            for kernel, first_log, last_log in zip(kernels, first.logs, last.logs)
        },
        tuple(sorted(contradictions, key=lambda contradiction: -abs(contradiction.change))),
        tuple(kernels[index].name for index in solution.outliers),
        tuple(number for number in list_parameters(record) if number not in decided),
        tuple(skipped),
    )

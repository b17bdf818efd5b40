"""A calibration: kernels are timed with numbers changed one by one, to find the changes that explain measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nkw.errors import InvalidArgument, NkwError
from nkw.terminal import progress
from simulate.bundle.entries import Skipped
from simulate.calibrate.fit import DEPENDS, FEWEST, Found, Problem, solve
from simulate.calibrate.measurement import Measurement
from simulate.calibrate.numbers import Parameter, changed, entries, parameters
from simulate.hardware import Hardware, hardware
from simulate.hardware.overlay import standing_in

_STEP = 0.05  # change of a number for a finite difference, as a logarithm, towards longer times
_SLIGHT = DEPENDS / 4.0
"""An elasticity below this is taken for 0."""
_MANY = 10_000
"""Instructions of a kernel from which on numbers are changed together first."""
_ROUNDS = 6
_LENIENT = 2  # rounds
_SETTLED = 0.005  # change of a number from one round to the next


@dataclass(frozen=True)
class Contradiction:
    """A number that measured times contradict: `change` and `error` are natural logarithms.

    kernels: how many times depend on it. before, after: the median error of these by the record, and with all changes.
    instead: numbers that explain the times nearly as well; without any, the number is determined.
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
        """Whether no other number explains the times as well."""
        return not self.instead

    @property
    def measured(self) -> float:
        """The value that the measurements call for."""
        return self.recorded * math.exp(self.change)


@dataclass(frozen=True)
class Calibration:
    """What measurements of one chip say about its record.

    times_ns: measured, predicted by the record, and predicted with all changes, for every kernel by name. undecided:
    numbers of times that none of these kernels depends on.
    """

    record: Hardware
    times_ns: Mapping[str, tuple[float, float, float]]
    contradictions: tuple[Contradiction, ...]
    outliers: tuple[str, ...]
    undecided: tuple[Parameter, ...]
    skipped: tuple[Skipped, ...]

    @property
    def median_errors(self) -> tuple[float, float]:
        """The median of |predicted / measured - 1| by the record, and with the changes."""
        rows = np.array(list(self.times_ns.values()))
        return tuple(float(np.median(np.abs(rows[:, column] / rows[:, 0] - 1.0))) for column in (1, 2))  # type: ignore[return-value]

    def overlay(self, source: str) -> dict[str, dict[str, Any]]:
        """The overlay for this chip: numbers that the measurements determine, and those of an overlay in use."""
        found = [each for each in self.contradictions if each.determined]
        sources = {each.number: f"{source}: {each.kernels} kernels" for each in found}
        return entries(self.record, {each.number: each.change for each in found}, sources)


def calibrate(target: str, measurements: Sequence[Measurement]) -> Calibration:
    """What measurements say about the record of a chip. Raises InvalidArgument for fewer than four usable ones."""
    record = hardware(target)
    kernels, skipped = _usable(record, measurements)
    if len(kernels) < FEWEST:
        why = "; ".join(f"{each.name}: {each.why}" for each in skipped[:3])
        raise InvalidArgument(
            "NKW-CALIBRATE",
            f"{len(kernels)} measured times of {target} can be used; {FEWEST} at least tell a number from an outlier"
            + (f" ({why})" if why else ""),
        )
    first = point = _Point.at(record, {}, kernels)
    found = _solved(point, record, lenient=True)
    for number in range(_ROUNDS):
        after = {point.numbers[each]: float(by) for each, by in zip(found.numbers, found.changes)}
        if _alike(point.changes, after):
            break
        point = _Point.at(record, after, kernels, point)
        found = _solved(point, record, lenient=number < _LENIENT)
    return _reported(record, first, point, found, kernels, skipped)


def _usable(record: Hardware, measurements: Sequence[Measurement]) -> tuple[list[Measurement], list[Skipped]]:
    """The measurements that can be predicted, and why others cannot."""
    found, skipped = [], []
    for each in measurements:
        try:
            if not each.predict(remember=True) > 0.0:
                skipped.append(Skipped(each.name, "its predicted time is 0"))
                continue
        except NkwError as refused:
            skipped.append(Skipped(each.name, refused.message))
        except Exception as failed:  # whatever the kernel does
            skipped.append(Skipped(each.name, f"{type(failed).__name__}: {failed!s:.100}"))
        else:
            found.append(each)
    return found, skipped


@dataclass(frozen=True)
class _Point:
    """A record with changes, the logarithms of all predicted times, and their elasticities by kernel and number."""

    changes: Mapping[Parameter, float]
    kernels: Sequence[Measurement]
    logs: np.ndarray
    rows: Sequence[Mapping[Parameter, float]]
    numbers: tuple[Parameter, ...]
    elasticities: np.ndarray

    @classmethod
    def at(
        cls,
        record: Hardware,
        changes: Mapping[Parameter, float],
        kernels: Sequence[Measurement],
        before: _Point | None = None,
    ) -> _Point:
        """Predict every kernel, and again with numbers changed that may decide its time.

        What made no difference to speak of at the point `before` is taken to make none here.
        """
        own = changed(record, changes)
        logs: list[float] = []
        rows: list[dict[Parameter, float]] = []
        for place, each in enumerate(progress(kernels, "calibration")):
            with standing_in(own):
                log, numbers = math.log(each.predict(remember=True)), each.predict.numbers()
            idle = before.idle(place) if before is not None else set()

            def growth(some: Sequence[Parameter], each: Measurement = each, log: float = log) -> float:
                slower = {number: changes.get(number, 0.0) + number.slower * _STEP for number in some}
                with standing_in(changed(record, {**changes, **slower})):
                    return (math.log(each.predict()) - log) / _STEP

            logs.append(log)
            left = [number for number in numbers if number not in idle]
            groups = [left] if each.predict.instructions >= _MANY else [[number] for number in left]
            rows.append({number: by for some in groups for number, by in elasticities(growth, some).items()})
        named = tuple(sorted({number for row in rows for number in row}))
        matrix = np.array([[row.get(number, 0.0) for number in named] for row in rows])
        return cls(changes, kernels, np.array(logs), rows, named, matrix)

    def idle(self, place: int) -> set[Parameter]:
        """The numbers that were changed and made no difference to speak of to the kernel at `place`."""
        return {number for number, by in self.rows[place].items() if abs(by) < _SLIGHT}

    @property
    def ratios(self) -> np.ndarray:
        """Logarithms of measured over predicted times."""
        return np.array([math.log(each.measured_ns) for each in self.kernels]) - self.logs


def elasticities(
    growth: Callable[[Sequence[Parameter]], float], numbers: Sequence[Parameter]
) -> dict[Parameter, float]:
    """The elasticity of a time by number; `growth` is that of the time when some numbers get slower together.

    A slower number makes a launch faster by anomalies of the list scheduler alone, which are small in long launches. So
    where several together make no difference there, none of them does.
    """
    if not numbers:
        return {}
    together = growth(numbers)
    if len(numbers) == 1:
        return {numbers[0]: together * numbers[0].slower}
    if abs(together) < _SLIGHT:
        return dict.fromkeys(numbers, 0.0)
    half = len(numbers) // 2
    return {**elasticities(growth, numbers[:half]), **elasticities(growth, numbers[half:])}


def _solved(point: _Point, record: Hardware, lenient: bool) -> Found:
    """The changes from the record, by the elasticities at a point."""
    at = np.array([point.changes.get(each, 0.0) for each in point.numbers])
    return solve(
        Problem(
            point.ratios + point.elasticities @ at,
            point.elasticities,
            np.array([each.spread for each in point.kernels]),
            np.array([each.likely(record) for each in point.numbers]),
            np.array([each.most(record) for each in point.numbers]),
        ),
        lenient,
    )


def _alike(before: Mapping[Parameter, float], after: Mapping[Parameter, float]) -> bool:
    return before.keys() == after.keys() and all(abs(after[each] - before[each]) < _SETTLED for each in after)


def _reported(
    record: Hardware,
    first: _Point,
    last: _Point,
    found: Found,
    kernels: Sequence[Measurement],
    skipped: Sequence[Skipped],
) -> Calibration:
    before, after = (np.abs(np.expm1(-point.ratios)) for point in (first, last))
    contradictions = []
    for place, change, error, instead in zip(found.numbers, found.changes, found.errors, found.instead):
        heard = np.abs(last.elasticities[:, place]) >= DEPENDS
        number = last.numbers[place]
        contradictions.append(
            Contradiction(
                number,
                number.value(record),
                float(change),
                float(error),
                int(heard.sum()),
                float(np.median(before[heard])),
                float(np.median(after[heard])),
                tuple(last.numbers[each] for each in instead),
            )
        )
    decided = {
        last.numbers[each] for each in np.flatnonzero((np.abs(last.elasticities) >= DEPENDS).any(axis=0))
    }
    return Calibration(
        record,
        {
            each.name: (each.measured_ns, math.exp(one), math.exp(other))
            for each, one, other in zip(kernels, first.logs, last.logs)
        },
        tuple(sorted(contradictions, key=lambda each: -abs(each.change))),
        tuple(kernels[each].name for each in found.outliers),
        tuple(each for each in parameters(record) if each not in decided),
        tuple(skipped),
    )

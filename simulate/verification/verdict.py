"""Verdict on a kernel: right, clean, how fast and what bounds it; as text of some 20 lines and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nkw.errors import shown
from nkw.report import Hanging, Part, table
from nkw.terminal import rendered
from simulate.check import Finding
from simulate.check.formats import plain_findings
from simulate.level import Rules
from simulate.profile import Profile
from simulate.profile.advice import Bound
from simulate.profile.numbers import format_share, format_us
from simulate.run import Launch
from simulate.timing import Reading
from simulate.verification.statistical_trials import RMS, SLOPE
from simulate.verification.trial import Outcome, Trial

_FINDINGS_SHOWN, _REASONS_SHOWN = 2, 2
_BOUNDS_SHOWN = 2
_UNDECIDED = (Outcome.not_taken, Outcome.open)
_RESOURCES = {"memory": "HBM", "compute": "Tensor engine"}


@dataclass(frozen=True)
class Speed:
    """Predicted time of the kernel at the requested sizes, from the first instruction to the last result.

    time_ns: under the program reading of the timing model. bracket_ns: the shortest and the longest of all
    readings. floor_ns: the least time at peak rates for the work and for the bytes that have to be moved;
    floor_bound: which of them takes it, "HBM" or "Tensor engine". busiest: the engine or DMA queue that is
    busy longest; busiest_share: its part of the time, 0 to 1. bounds: the two largest of the vendor's bounds
    that differ, none for several cores.
    """

    time_ns: float
    bracket_ns: tuple[float, float]
    floor_ns: float
    floor_bound: str
    busiest: str
    busiest_share: float
    bounds: tuple[Bound, ...]

    @classmethod
    def from_profile(cls, seen: Profile) -> Speed:
        """Return the figures of a verdict from the profile of a launch, which has all readings."""
        lengths = [timeline.length_ns for timeline in seen.timelines.values()]
        line = seen.timeline
        return cls(
            seen.length_ns,
            (min(lengths), max(lengths)),
            seen.roofline.least_ns,
            _RESOURCES[seen.roofline.bound],
            line.busiest,
            line.busy_ns[line.busiest] / line.length_ns if line.length_ns else 0.0,
            _select_largest(seen.bounds),
        )

    @property
    def floor_share(self) -> float:
        """Ratio of the floor to the predicted time, 0.0 if the time is 0."""
        return self.floor_ns / self.time_ns if self.time_ns else 0.0


@dataclass(frozen=True)
class Verdict:
    """Result of `verify`.

    advice: Number of warnings of lint, which do not make a kernel unclean. findings: The findings that make
    it unclean. speed: None if the kernel did not run to its end at the requested sizes. tolerated: Codes of
    broken rules that the chosen rules (`--rules`) tolerate. slow_reference: A sentence on a reference that
    took seconds, or empty; part of the text, not of the JSON.
    """

    kernel: str
    target: str
    trials: tuple[Trial, ...]
    findings: tuple[Finding, ...]
    tolerated: tuple[str, ...]
    advice: int
    speed: Speed | None
    launch: Launch | None = field(default=None, compare=False, repr=False)
    slow_reference: str = field(default="", compare=False, repr=False)

    @property
    def right(self) -> bool:
        """Whether no trial is wrong and the first trial, on random values, is right."""
        return self.reason == ""

    @property
    def reason(self) -> str:
        """Name and reason of the first trial that makes the kernel not right; empty for a right kernel."""
        for trial in self.trials:
            if trial.outcome is Outcome.wrong or (
                trial is self.trials[0] and trial.outcome is not Outcome.right
            ):
                return f"{trial.name}: {trial.reason}"
        return ""

    @property
    def clean(self) -> bool:
        """Whether `findings` is empty."""
        return not self.findings

    @property
    def status(self) -> int:
        """Exit status: 0 for a right and clean kernel, else 1."""
        return 0 if self.right and self.clean else 1

    def __str__(self) -> str:
        return rendered(self.build_text())

    def build_text(self) -> list[Part]:
        """Build the parts of the text for a terminal, some 20 lines: headline, trials, findings and speed."""
        return [Hanging(self._headline(), style="bold"), *self._trials(), *self._findings(), *self._speed()]

    def _headline(self) -> str:
        words = ["right" if self.right else "WRONG", "clean" if self.clean else _count(self.findings)]
        if self.speed is not None:
            words.append(f"{format_us(self.speed.time_ns)} us")
        chip = self.target if self.launch is None else self.launch.hardware.label
        return f"{self.kernel} on {chip}: {', '.join(words)}"

    def _trials(self) -> list[Part]:
        rows = [_make_row(trial.name, trial) for trial in self.trials if not trial.ragged]
        for outcome in Outcome:
            sized = [trial for trial in self.trials if trial.ragged and trial.outcome is outcome]
            if sized:
                name = ", ".join(dict.fromkeys(trial.name for trial in sized))
                rows.append(_make_row(name, max(sized, key=lambda trial: trial.closeness)))
        return [
            table("values or size|outcome|error|allowed|largest", rows, left=(0, 1), firm=(1,)),
            *self._untried(),
            *(Hanging(reason) for reason in self._reasons(Outcome.wrong)),
            *(Hanging(reason) for outcome in _UNDECIDED for reason in self._reasons(outcome)[:1]),
            *([Hanging(self.slow_reference)] if self.slow_reference else []),
        ]

    def _untried(self) -> list[Part]:
        """Return a sentence on the number of trials with outcome "not taken"; empty if there are none."""
        tried = [
            trial for trial in self.trials if trial.name not in (RMS, SLOPE)
        ]  # those judge the random trials
        count = sum(trial.outcome is Outcome.not_taken for trial in tried)
        return [Hanging(f"{count} of {len(tried)} trials could not be tried")] if count else []

    def _reasons(self, outcome: Outcome) -> list[str]:
        """Return the first two different reasons of trials with an outcome, each after the names of its trials."""
        names: dict[str, list[str]] = {}
        for trial in self.trials:
            if trial.outcome is outcome:
                names.setdefault(trial.reason, []).append(trial.name)
        reasons = [f"{', '.join(names[reason])}: {reason}" for reason in list(names)[:_REASONS_SHOWN]]
        return [shown(reason, len(reason)) for reason in reasons]

    def _findings(self) -> list[Part]:
        out: list[Part] = [
            line for finding in self.findings[:_FINDINGS_SHOWN] for line in _format_finding(finding)
        ]
        more = len(self.findings) - _FINDINGS_SHOWN
        if more > 0:
            out.append(f"and {more} more; `nkw check` prints all")
        if self.tolerated:
            reason = (
                "by the vendor's simulator" if Rules.resolve() is Rules.simulator else "as in public kernels"
            )
            out.append(Hanging(f"tolerated {reason}: {', '.join(self.tolerated)}"))
        return out

    def _speed(self) -> list[Part]:
        if self.speed is None:
            return []
        seen = self.speed
        low, high = (format_us(bracket_ns) for bracket_ns in seen.bracket_ns)
        floor_share = format_share(seen.floor_ns, seen.time_ns)
        floor = f"floor {format_us(seen.floor_ns)} us ({seen.floor_bound}), {floor_share} of the time"
        bounds = ", ".join(f"{bound.name} {format_us(bound.time_ns)} us" for bound in seen.bounds)
        return [
            Hanging(
                f"predicted {format_us(seen.time_ns)} us (program reading), {low} to {high} over all readings"
            ),
            Hanging(f"{floor}; busiest: {seen.busiest}, {format_share(seen.busiest_share, 1)}"),
            *([Hanging(f"vendor's largest bounds: {bounds}")] if bounds else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as plain values; docs/json.md has the schema."""
        seen = self.speed
        return {
            "kernel": self.kernel,
            "target": self.target,
            "status": self.status,
            "right": self.right,
            "reason": self.reason,
            "clean": self.clean,
            "trials": [
                {
                    "name": trial.name,
                    "ragged": trial.ragged,
                    "shapes": trial.arguments,
                    "outcome": trial.outcome.value,
                    "reason": trial.reason,
                    "error": trial.error,
                    "allowed": trial.allowed,
                    "largest": trial.largest,
                }
                for trial in self.trials
            ],
            "findings": plain_findings(self.findings),
            "tolerated": list(self.tolerated),
            "lint_warnings": self.advice,
            "speed": seen
            and {
                "reading": Reading.program.value,
                "time_ns": seen.time_ns,
                "bracket_ns": list(seen.bracket_ns),
                "floor_ns": seen.floor_ns,
                "floor_share": seen.floor_share,
                "floor_bound": seen.floor_bound,
                "busiest": seen.busiest,
                "busiest_share": seen.busiest_share,
                "bounds": [{"name": bound.name, "time_ns": bound.time_ns} for bound in seen.bounds],
            },
        }


def _select_largest(bounds: Sequence[Bound]) -> tuple[Bound, ...]:
    """Return the two largest bounds with different times, largest first; of equal times the first bound."""
    differing = {bound.time_ns: bound for bound in reversed(bounds)}
    return tuple(differing[time_ns] for time_ns in sorted(differing, reverse=True)[:_BOUNDS_SHOWN])


def _make_row(name: str, trial: Trial) -> tuple[str, ...]:
    figures = (trial.error, trial.allowed, trial.largest)
    words = ("" if figure is None else f"{figure:.2g}" for figure in figures)
    return (name, trial.outcome.value, *words)


def _count(findings: Sequence[Finding]) -> str:
    return f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"


def _format_finding(finding: Finding) -> list[Part]:
    """Return the lines of a finding: severity, code, place and message, and its hint after "try:"."""
    where = f" at {finding.where.file_line}" if finding.where else ""
    head, *lines = finding.message.split("\n")
    texts = [f"{finding.severity.value}[{finding.code}]{where}: {head}", *lines]
    if finding.hint:
        texts.append(f"  try: {finding.hint}")
    return [Hanging(shown(line, len(line)), len(line) - len(line.lstrip()) + 2) for line in texts]

"""Compared cases, and compared steps of a generation.

A step runs the model for one token. Its cases are launches of kernels, and the last, the head, chooses the
token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulate.bundle.generation import Step
from simulate.bundle.manifest import Bundle, Case
from simulate.bundle.profiled import CaseProfile
from simulate.bundle.result import DEVICE, RAN, CaseResult
from simulate.bundle.values import Agreement, OutputComparison

_WORST_FIRST = (Agreement.wrong, Agreement.missing, Agreement.unbounded, Agreement.within)


def find_worst(agreements: Iterable[Agreement]) -> Agreement:
    """Return the worst of some agreements; `equal` if there is none.

    From worst to best: wrong, missing, unbounded, within, equal.
    """
    seen = set(agreements)
    return next((agreement for agreement in _WORST_FIRST if agreement in seen), Agreement.equal)


@dataclass(frozen=True)
class CaseComparison:
    """A case with its result and the comparison of its outputs.

    `result` is None if the case was not requested. `outputs` is empty unless the kernel ran.
    """

    case: Case
    result: CaseResult | None
    outputs: tuple[OutputComparison, ...]
    profile: CaseProfile | None = None

    @property
    def ran(self) -> bool:
        """Whether the kernel returned outputs."""
        return self.result is not None and self.result.status == RAN

    @property
    def agreement(self) -> Agreement | None:
        """Agreement of the output that differs most, `equal` without outputs; None if the case did not run."""
        if not self.ran:
            return None
        return find_worst(output.agreement for output in self.outputs)

    @property
    def bracket_ns(self) -> tuple[float, float]:
        """Shortest and longest predicted time in ns.

        They are the shortest reading of the instruction stream, and the longest reading plus the overhead of
        starting and ending the kernel.
        """
        low, high = self.case.predicted.bracket_ns
        return low, high + self.case.predicted.overhead_ns

    @property
    def device_ns(self) -> float | None:
        """Median time on the device in ns; None if the case was not timed, or only by the host's clock."""
        times = self.result.times if self.result else None
        return times.median_ns if times and times.clock == DEVICE else None

    @property
    def inside(self) -> bool | None:
        """Whether the median time on the device is inside `bracket_ns`, the predicted times.

        None without such a time.
        """
        low, high = self.bracket_ns
        return None if self.device_ns is None else low <= self.device_ns <= high

    @property
    def program(self) -> str:
        """Name of the first case of the same kernel with arguments of the same shapes, perhaps this case."""
        return self.case.like or self.case.name

    @property
    def agrees(self) -> bool:
        """Whether all outputs are equal or within their bounds, and the time is not outside its bracket.

        Only a time on the device can be outside. False if the kernel did not run.
        """
        return self.agreement in (Agreement.equal, Agreement.within) and self.inside is not False


@dataclass(frozen=True)
class StepComparison:
    """A step of a generation with the comparisons of its launches, in order.

    `step` has the expected token and names the head, the launch that chooses the token.
    """

    step: Step
    cases: tuple[CaseComparison, ...]

    @property
    def head(self) -> CaseComparison | None:
        """Comparison of the launch that chooses the token; None if that launch was not requested."""
        return next((launch for launch in self.tried if launch.case.name == self.step.case), None)

    @property
    def tried(self) -> tuple[CaseComparison, ...]:
        """Launches of the step that were requested."""
        return tuple(launch for launch in self.cases if launch.result is not None)

    @property
    def token(self) -> int | None:
        """Token that the chip chose; None if the head was not requested or did not run."""
        return self.head.result.token if self.head is not None and self.head.result is not None else None

    @property
    def moved(self) -> float:
        """Largest difference between the chip's largest logits and the expected ones; 0 if unknown.

        If the head was launched again with the expected inputs, the difference of its first outputs counts.
        """
        head, index = self.head, self.step.values
        if head is None or head.result is None:
            return 0.0
        if index < len(head.result.drift):
            return head.result.drift[index]
        return head.outputs[index].error or 0.0 if index < len(head.outputs) else 0.0

    @property
    def is_tie(self) -> bool:
        """Whether the error of the logits, `moved`, is large enough to swap the two largest expected logits."""
        return self.step.margin <= 2.0 * self.moved

    @property
    def agrees(self) -> bool:
        """Whether the chip chose the expected token, or another token while `is_tie` holds.

        True if the head was not requested; False if it was requested and chose no token. The values of
        outputs and the times do not count.
        """
        return self.head is None or self.token == self.step.token or (self.token is not None and self.is_tie)

    @property
    def bracket_ns(self) -> tuple[float, float]:
        """Sums in ns of the shortest and of the longest predicted times of all launches, requested or not."""
        lows, highs = zip(*(launch.bracket_ns for launch in self.cases))
        return sum(lows), sum(highs)

    @property
    def measured_ns(self) -> float | None:
        """Sum in ns of the median times of all launches, by whichever clock.

        None if a launch of the step has no time.
        """
        times = [launch.result.times if launch.result else None for launch in self.cases]
        known = [launch_times.median_ns for launch_times in times if launch_times is not None]
        return sum(known) if len(known) == len(times) else None


def group_steps(bundle: Bundle, cases: Sequence[CaseComparison]) -> tuple[StepComparison, ...]:
    """Return a `StepComparison` for each step of the bundle's generation.

    Empty in a bundle without a generation.

    Args:
        cases: Comparisons of all cases of the bundle, whose `step` is the index of a step.
    """
    if bundle.generated is None:
        return ()
    launches: list[list[CaseComparison]] = [[] for _ in bundle.generated.steps]
    for case in cases:
        launches[case.case.step].append(case)
    return tuple(
        StepComparison(step, tuple(step_cases)) for step, step_cases in zip(bundle.generated.steps, launches)
    )

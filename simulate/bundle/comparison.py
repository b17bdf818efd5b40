"""A case, and a step of a generation, as it came back, against what was expected and predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulate.bundle.generation import Step
from simulate.bundle.manifest import Bundle, Case
from simulate.bundle.profiled import CaseProfile
from simulate.bundle.result import DEVICE, RAN, CaseResult
from simulate.bundle.values import Agreement, OutputComparison

_WORST_FIRST = (Agreement.wrong, Agreement.missing, Agreement.unbounded, Agreement.within)


def worst(found: Iterable[Agreement]) -> Agreement:
    """The agreement that is least, equal where there is none."""
    seen = set(found)
    return next((each for each in _WORST_FIRST if each in seen), Agreement.equal)


@dataclass(frozen=True)
class CaseComparison:
    """One case: what should have come back, what came, and how its outputs agree."""

    case: Case
    result: CaseResult | None
    outputs: tuple[OutputComparison, ...]
    profile: CaseProfile | None = None

    @property
    def ran(self) -> bool:
        """Whether it returned something."""
        return self.result is not None and self.result.status == RAN

    @property
    def agreement(self) -> Agreement | None:
        """The agreement of the output that agrees least; None where it did not run."""
        if not self.ran:
            return None
        return worst(each.agreement for each in self.outputs)

    @property
    def bracket_ns(self) -> tuple[float, float]:
        """The shortest reading, and the longest with the overhead of starting and ending the kernel."""
        low, high = self.case.predicted.bracket_ns
        return low, high + self.case.predicted.overhead_ns

    @property
    def device_ns(self) -> float | None:
        """The median time on the device; None where only the host's clock, or none, was read."""
        times = self.result.times if self.result else None
        return times.median_ns if times and times.clock == DEVICE else None

    @property
    def inside(self) -> bool | None:
        """Whether the time on the device lies in the bracket; None where there is none."""
        low, high = self.bracket_ns
        return None if self.device_ns is None else low <= self.device_ns <= high

    @property
    def program(self) -> str:
        """The first case of the same kernel on arguments of the same shapes."""
        return self.case.like or self.case.name

    @property
    def agrees(self) -> bool:
        """Whether its values agree as far as that can be known, and its time is not outside."""
        return self.agreement in (Agreement.equal, Agreement.within) and self.inside is not False


@dataclass(frozen=True)
class StepComparison:
    """A step of a generation with its launches, of which the head's chooses the token."""

    step: Step
    cases: tuple[CaseComparison, ...]

    @property
    def head(self) -> CaseComparison | None:
        """The launch that chooses the token; None where it was not tried."""
        return next((each for each in self.tried if each.case.name == self.step.case), None)

    @property
    def tried(self) -> tuple[CaseComparison, ...]:
        """The launches that were to run."""
        return tuple(each for each in self.cases if each.result is not None)

    @property
    def token(self) -> int | None:
        """The token that was chosen; None where none was."""
        return self.head.result.token if self.head is not None and self.head.result is not None else None

    @property
    def moved(self) -> float:
        """How far the largest logits are from those expected, as far as that is known."""
        head, place = self.head, self.step.values
        if head is None or head.result is None:
            return 0.0
        if place < len(head.result.drift):
            return head.result.drift[place]
        return head.outputs[place].error or 0.0 if place < len(head.outputs) else 0.0

    @property
    def is_tie(self) -> bool:
        """Whether the two largest logits lie so close that rounding alone can exchange them."""
        return self.step.margin <= 2.0 * self.moved

    @property
    def agrees(self) -> bool:
        """Whether the expected token was chosen, or another one for rounding; or no token was to be."""
        return self.head is None or self.token == self.step.token or (self.token is not None and self.is_tie)

    @property
    def bracket_ns(self) -> tuple[float, float]:
        """The brackets of all launches together."""
        lows, highs = zip(*(each.bracket_ns for each in self.cases))
        return sum(lows), sum(highs)

    @property
    def measured_ns(self) -> float | None:
        """The median times of all launches together; None where one has none."""
        times = [each.result.times if each.result else None for each in self.cases]
        known = [each.median_ns for each in times if each is not None]
        return sum(known) if len(known) == len(times) else None


def steps_of(bundle: Bundle, cases: Sequence[CaseComparison]) -> tuple[StepComparison, ...]:
    """The steps of a generation; none in a bundle without."""
    if bundle.generated is None:
        return ()
    launches: list[list[CaseComparison]] = [[] for _ in bundle.generated.steps]
    for each in cases:
        launches[each.case.step].append(each)
    return tuple(StepComparison(step, tuple(own)) for step, own in zip(bundle.generated.steps, launches))

"""Where a fault is to be looked for: in the simulator, in a kernel, or in the environment; by rules that can be read.

A case has failed, is wrong (an output beyond its bound), has a time outside (on the device, not within the bracket), or
agrees. The rules, in their order; the first that speaks of a case decides:

1. Nothing ran, files of the bundle were changed, another target, or the run was cut short: the environment.
2. A case was skipped, failed at its import, crashed, took too long, or its values could not be written or read: the
   environment.
3. A case failed, is wrong, or its time is outside, and NKI has another release than the bundle expects: the
   environment.
4. A case was refused by the compiler or failed on the device. Where no case got further: the environment. Where
   `nkw check` had findings about its kernel: the kernel. Else the simulator, which accepts what the chip does not.
5. A case is wrong, and `nkw check` had findings about its kernel: the kernel.
6. Several cases are wrong, and share instructions that no case uses whose values agree: the simulator's model of these.
7. A case is wrong, and every instruction that it uses is used by a case whose values agree: the kernel.
8. A case is wrong, and others agree: the simulator's model of the instructions that only wrong cases use.
9. A case is wrong, and none agrees: undecided; more kernels are needed that share its instructions.
10. The time of a case is outside, its values are not wrong: as 6, 8 and 9, for the simulator's costs of the
    instructions that no case uses whose time is inside; where there are none, the simulator's schedule.

In a bundle of a model the rules look at one case of every program, the first that does not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from simulate.bundle.comparison import CaseComparison, StepComparison, steps_of
from simulate.bundle.manifest import Bundle
from simulate.bundle.profiled import profile_of
from simulate.bundle.result import RAN, Result
from simulate.bundle.values import Agreement, compare_case

_MOST_NAMED = 4
_ENVIRONMENT_ERRORS = ("Crash", "Timeout", "Exit", "Environment")


class Fault(Enum):
    """Where a fault is likely."""

    simulator = "the simulator"
    kernel = "the kernel"
    environment = "the environment"
    undecided = "undecided"


@dataclass(frozen=True)
class Likely:
    """One fault: where it is likely, the rule that says so, why, and the cases concerned."""

    fault: Fault
    rule: int
    why: str
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """A whole result against its bundle. `intact`: whether the bundle's files still have its digest.

    `steps` are those of a generation, in a bundle of a model.
    """

    bundle: Bundle
    result: Result
    cases: tuple[CaseComparison, ...]
    intact: bool
    steps: tuple[StepComparison, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether every case that was to run agrees."""
        tokens = all(each.agrees for each in self.steps)
        return bool(self.tried) and all(each.agrees for each in self.tried) and tokens and not self.likely

    @property
    def tried(self) -> tuple[CaseComparison, ...]:
        """The cases that were to run."""
        return tuple(each for each in self.cases if each.result is not None)

    @property
    def programs(self) -> tuple[CaseComparison, ...]:
        """Of every program that was tried one case: the first that does not agree, or else the first.

        A program is a kernel on arguments of certain shapes; only in a bundle of a model it is that of several cases.
        """
        found: dict[str, CaseComparison] = {}
        for each in self.tried:
            first = found.setdefault(each.program, each)
            if first.agrees and not each.agrees:
                found[each.program] = each
        return tuple(found.values())

    @cached_property
    def likely(self) -> tuple[Likely, ...]:
        """Where the faults are likely, by the rules of this module."""
        return tuple(_likely(self))


def compared(folder: Path, bundle: Bundle, result: Result, intact: bool) -> Comparison:
    """Every case of a bundle against its result. Raises InvalidArgument where the bundle's own files cannot be read."""
    cases: list[CaseComparison] = []
    for case in bundle.cases:
        found = result.case(case.name)
        ran = found is not None and found.status == RAN
        outputs = compare_case(folder, case, found) if ran and found else ()
        cases.append(CaseComparison(case, found, outputs, profile_of(folder, case, found)))
    return Comparison(bundle, result, tuple(cases), intact, steps_of(bundle, cases))


def _likely(seen: Comparison) -> Iterable[Likely]:
    yield from _whole(seen)
    tried = seen.programs
    rest = []
    for each in tried:
        why = _of_the_environment(each)
        if why:
            yield Likely(Fault.environment, 2, why, (each.case.name,))
        elif not each.agrees and each.agreement is not Agreement.unbounded:
            rest.append(each)
    release = _other_release(seen)
    if rest and release:
        yield Likely(Fault.environment, 3, release, _names(rest))
        return
    yield from _failed([each for each in rest if not each.ran], tried)
    yield from _wrong(rest, tried)
    yield from _out_of_time(rest, tried)


def _whole(seen: Comparison) -> Iterable[Likely]:
    """Rule 1."""
    whys = []
    if not any(each.ran for each in seen.cases):
        said = "; ".join(message for _, message in seen.result.failures)
        whys.append(f"nothing ran{': ' + said if said else ''}")
    if not seen.intact or seen.result.bundle != seen.bundle.digest:
        whys.append("the files that ran are not those of this bundle: their digests differ")
    if seen.result.target != seen.bundle.target:
        whys.append(f"it ran for {seen.result.target}, the bundle is for {seen.bundle.target}")
    if seen.result.finished is None:
        whys.append("run.py was cut short")
    for why in whys:
        yield Likely(Fault.environment, 1, why, ())


def _of_the_environment(each: CaseComparison) -> str:
    """Rule 2: why a case tells nothing about the simulator or the kernel; empty for others."""
    assert each.result is not None
    kind, message = each.result.error or ("", "")
    if each.result.stage == "import" or kind in _ENVIRONMENT_ERRORS:
        return f"it failed at {each.result.stage}: {kind}: {message}"
    missing = [output for output in each.outputs if output.agreement is Agreement.missing]
    return f"{missing[0].name}: {missing[0].why}" if missing else ""


def _other_release(seen: Comparison) -> str:
    """Rule 3: that NKI has another release; empty where it has the one expected."""
    found = seen.result.environment.packages.get("nki")
    wanted = seen.bundle.expects.nki
    if found is None or ".".join(found.split(".")[:2]) == wanted or not wanted[:1].isdigit():
        return ""
    return f"nki {found} is installed, the bundle is for {wanted}"


def _failed(failed: Sequence[CaseComparison], tried: Sequence[CaseComparison]) -> Iterable[Likely]:
    """Rule 4."""
    nothing_ran = not any(each.ran for each in tried)
    for each in failed:
        assert each.result is not None
        kind, message = each.result.error or ("", "no reason is given")
        said = f"it failed at {each.result.stage}: {kind}: {message}"
        if nothing_ran:
            yield Likely(Fault.environment, 4, f"{said}; no other kernel got further", _names([each]))
        elif each.case.findings:
            yield Likely(
                Fault.kernel, 4, f"{said}; nkw check had found {_listed(each.case.findings)}", _names([each])
            )
        else:
            yield Likely(Fault.simulator, 4, f"{said}; it ran here without a finding", _names([each]))


def _wrong(rest: Sequence[CaseComparison], tried: Sequence[CaseComparison]) -> Iterable[Likely]:
    """Rules 5 to 9."""
    wrong = [each for each in rest if each.agreement is Agreement.wrong]
    for each in wrong:
        if each.case.findings:
            why = f"its values are wrong, and nkw check had found {_listed(each.case.findings)}"
            yield Likely(Fault.kernel, 5, why, _names([each]))
    clean = [each for each in wrong if not each.case.findings]
    right = [each for each in tried if each.agreement in (Agreement.equal, Agreement.within)]

    def own(each: CaseComparison, only: set[str]) -> Likely:
        if right and not only:
            why = "its values are wrong, and all of its instructions are right in other kernels"
            return Likely(Fault.kernel, 7, why, _names([each]))
        if right:
            why = f"its values are wrong, and no kernel that is right uses {_listed(only)}"
            return Likely(Fault.simulator, 8, why, _names([each]))
        why = "its values are wrong; bundle more kernels that share its instructions"
        return Likely(Fault.undecided, 9, why, _names([each]))

    yield from _by_instruction(clean, right, 6, "are wrong, and no kernel that is right does", own)


def _out_of_time(rest: Sequence[CaseComparison], tried: Sequence[CaseComparison]) -> Iterable[Likely]:
    """Rule 10."""
    outside = [each for each in rest if each.inside is False and each.agreement is not Agreement.wrong]
    inside = [each for each in tried if each.inside]

    def own(each: CaseComparison, only: set[str]) -> Likely:
        low, high = (f"{ns / 1e3:.3f}" for ns in each.bracket_ns)
        said = f"its time on the device, {(each.device_ns or 0) / 1e3:.3f} us, is not from {low} to {high} us"
        if inside and only:
            said += f"; no kernel that keeps to its bracket uses {_listed(only)}"
            return Likely(Fault.simulator, 10, said, _names([each]))
        if inside:
            said += "; all of its instructions keep to their times elsewhere, so it is the schedule"
            return Likely(Fault.simulator, 10, said, _names([each]))
        return Likely(
            Fault.undecided, 10, f"{said}; bundle more kernels that share its instructions", _names([each])
        )

    yield from _by_instruction(
        outside, inside, 10, "have times outside of their brackets, and no kernel inside its own does", own
    )


def _by_instruction(
    bad: Sequence[CaseComparison],
    good: Sequence[CaseComparison],
    rule: int,
    says: str,
    own: Callable[[CaseComparison, set[str]], Likely],
) -> Iterable[Likely]:
    """One fault for the cases that share instructions which no good case uses; else `own` has that of each."""
    innocent = {op for each in good for op in each.case.instructions.ops}
    only = {each.case.name: set(each.case.instructions.ops) - innocent for each in bad}
    shared = set.intersection(*only.values()) if len(bad) > 1 else set()
    if shared and good:
        why = f"kernels that use {_listed(shared)} {says}"
        yield Likely(Fault.simulator, rule, why, _names(bad))
        return
    for each in bad:
        yield own(each, only[each.case.name])


def _names(cases: Iterable[CaseComparison]) -> tuple[str, ...]:
    return tuple(each.case.name for each in cases)


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + more

"""Likely faults: the simulator, a kernel, or the environment; by documented rules.

A case failed, is wrong (an output is beyond its bound), has a time outside (on the device, not within the
bracket), or agrees. The first of these rules that applies to a case decides:

1. Nothing ran, files of the bundle were changed, another target, or the run was interrupted: the environment.
2. A case was skipped, failed at its import, crashed, took too long, or its outputs could not be written or read: the
   environment.
3. A case failed, is wrong, or its time is outside, and NKI has another release than the bundle expects: the
   environment.
4. A case was refused by the compiler or failed on the device. If no case got further: the environment. If
   `nkw check` had findings about its kernel: the kernel. Else the simulator, which accepts what the chip refuses.
5. A case is wrong, and `nkw check` had findings about its kernel: the kernel.
6. Several cases are wrong, and share instructions that no agreeing case uses: the simulator's model of these.
7. A case is wrong, and agreeing cases use every instruction that it uses: the kernel.
8. A case is wrong, and further cases agree: the simulator's model of the instructions that only wrong cases use.
9. A case is wrong, and none agrees: undecided; more kernels are needed that share its instructions.
10. The time of a case is outside, its outputs are not wrong: as 6, 8 and 9, for the simulator's costs of the
    instructions that no case with a time inside uses; without such instructions, the simulator's schedule.

In a bundle of a model the rules examine a case of every program, the first that does not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from simulate.bundle.comparison import CaseComparison, StepComparison, group_steps
from simulate.bundle.manifest import Bundle
from simulate.bundle.profiled import read_case_profile
from simulate.bundle.result import RAN, Result
from simulate.bundle.values import Agreement, compare_case

_MOST_NAMED = 4
_ENVIRONMENT_ERRORS = ("Crash", "Timeout", "Exit", "Environment")


class Fault(Enum):
    """Location of a likely fault."""

    simulator = "the simulator"
    kernel = "the kernel"
    environment = "the environment"
    undecided = "undecided"


@dataclass(frozen=True)
class Diagnosis:
    """A likely fault: its location, the rule that implies it, the reason, and the cases concerned."""

    fault: Fault
    rule: int
    why: str
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Comparison of a result with its bundle.

    `cases` has every case of the bundle, in order. `intact` tells whether the bundle's files still have its
    digest. `steps` are those of the generation, empty in a bundle of kernels.
    """

    bundle: Bundle
    result: Result
    cases: tuple[CaseComparison, ...]
    intact: bool
    steps: tuple[StepComparison, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether something was requested, every requested case and every step agrees, and no fault is likely."""
        tokens = all(step.agrees for step in self.steps)
        return bool(self.tried) and all(case.agrees for case in self.tried) and tokens and not self.likely

    @property
    def tried(self) -> tuple[CaseComparison, ...]:
        """Cases with a result, in order: those that `--only` left out are missing."""
        return tuple(case for case in self.cases if case.result is not None)

    @property
    def programs(self) -> tuple[CaseComparison, ...]:
        """A case with a result for every program: the first that does not agree, else the first.

        A program is a kernel with arguments of certain shapes. Only in a bundle of a model does a program
        have several cases.
        """
        cases_by_program: dict[str, CaseComparison] = {}
        for case in self.tried:
            first = cases_by_program.setdefault(case.program, case)
            if first.agrees and not case.agrees:
                cases_by_program[case.program] = case
        return tuple(cases_by_program.values())

    @cached_property
    def likely(self) -> tuple[Diagnosis, ...]:
        """Likely faults, by the rules of this module."""
        return tuple(_diagnose(self))


def compare_cases(folder: Path, bundle: Bundle, result: Result, intact: bool) -> Comparison:
    """Compare every case of a bundle with its result.

    Args:
        folder: Folder of the bundle, with the arrays of expected outputs and, below `result`, of returned
            ones.
        intact: Whether the bundle's files still have its digest.

    Raises:
        InvalidArgument: If an expected output cannot be read.
    """
    cases: list[CaseComparison] = []
    for case in bundle.cases:
        case_result = result.find_case(case.name)
        ran = case_result is not None and case_result.status == RAN
        outputs = compare_case(folder, case, case_result) if ran and case_result else ()
        cases.append(CaseComparison(case, case_result, outputs, read_case_profile(folder, case, case_result)))
    return Comparison(bundle, result, tuple(cases), intact, group_steps(bundle, cases))


def _diagnose(comparison: Comparison) -> Iterable[Diagnosis]:
    """Yield the likely faults by the rules of this module, in the order of rules."""
    yield from _diagnose_run(comparison)
    cases = comparison.programs
    disagreeing = []
    for case in cases:
        reason = _explain_environment_fault(case)
        if reason:
            yield Diagnosis(Fault.environment, 2, reason, (case.case.name,))
        elif not case.agrees and case.agreement is not Agreement.unbounded:
            disagreeing.append(case)
    release = _explain_release(comparison)
    if disagreeing and release:
        yield Diagnosis(Fault.environment, 3, release, _get_names(disagreeing))
        return
    yield from _diagnose_failed([case for case in disagreeing if not case.ran], cases)
    yield from _diagnose_wrong(disagreeing, cases)
    yield from _diagnose_times(disagreeing, cases)


def _diagnose_run(comparison: Comparison) -> Iterable[Diagnosis]:
    """Yield the faults of rule 1: nothing ran, changed files, another target, an interrupted run."""
    reasons = []
    if not any(case.ran for case in comparison.cases):
        messages = "; ".join(message for _, message in comparison.result.failures)
        reasons.append(f"nothing ran{': ' + messages if messages else ''}")
    if not comparison.intact or comparison.result.bundle != comparison.bundle.digest:
        reasons.append("the files that ran are not those of this bundle: their digests differ")
    if comparison.result.target != comparison.bundle.target:
        reasons.append(f"it ran for {comparison.result.target}, the bundle is for {comparison.bundle.target}")
    if comparison.result.finished is None:
        reasons.append("run.py was cut short")
    for reason in reasons:
        yield Diagnosis(Fault.environment, 1, reason, ())


def _explain_environment_fault(case: CaseComparison) -> str:
    """Return the reason if rule 2 applies to a case, else an empty string."""
    assert case.result is not None
    error_type, message = case.result.error or ("", "")
    if case.result.stage == "import" or error_type in _ENVIRONMENT_ERRORS:
        return f"it failed at {case.result.stage}: {error_type}: {message}"
    missing = [output for output in case.outputs if output.agreement is Agreement.missing]
    return f"{missing[0].name}: {missing[0].why}" if missing else ""


def _explain_release(comparison: Comparison) -> str:
    """Return the reason if rule 3 applies, else an empty string."""
    installed = comparison.result.environment.packages.get("nki")
    expected = comparison.bundle.expects.nki
    if installed is None or ".".join(installed.split(".")[:2]) == expected or not expected[:1].isdigit():
        return ""
    return f"nki {installed} is installed, the bundle is for {expected}"


def _diagnose_failed(
    failed: Sequence[CaseComparison], cases: Sequence[CaseComparison]
) -> Iterable[Diagnosis]:
    """Yield the faults of rule 4 for cases that were refused or failed.

    Args:
        failed: The cases that returned no outputs.
        cases: A case for every program, with which `failed` are compared.
    """
    nothing_ran = not any(case.ran for case in cases)
    for case in failed:
        assert case.result is not None
        error_type, message = case.result.error or ("", "no reason is given")
        failure = f"it failed at {case.result.stage}: {error_type}: {message}"
        if nothing_ran:
            yield Diagnosis(
                Fault.environment, 4, f"{failure}; no other kernel got further", _get_names([case])
            )
        elif case.case.findings:
            yield Diagnosis(
                Fault.kernel,
                4,
                f"{failure}; nkw check had found {_join_names(case.case.findings)}",
                _get_names([case]),
            )
        else:
            yield Diagnosis(
                Fault.simulator, 4, f"{failure}; it ran here without a finding", _get_names([case])
            )


def _diagnose_wrong(
    disagreeing: Sequence[CaseComparison], cases: Sequence[CaseComparison]
) -> Iterable[Diagnosis]:
    """Yield the faults of rules 5 to 9 for wrong cases.

    Args:
        disagreeing: Cases that do not agree and are not explained by rule 2.
        cases: A case for every program; those that agree clear their instructions.
    """
    wrong = [case for case in disagreeing if case.agreement is Agreement.wrong]
    for case in wrong:
        if case.case.findings:
            reason = f"its values are wrong, and nkw check had found {_join_names(case.case.findings)}"
            yield Diagnosis(Fault.kernel, 5, reason, _get_names([case]))
    clean = [case for case in wrong if not case.case.findings]
    right = [case for case in cases if case.agreement in (Agreement.equal, Agreement.within)]

    def diagnose(case: CaseComparison, only: set[str]) -> Diagnosis:
        if right and not only:
            reason = "its values are wrong, and all of its instructions are right in other kernels"
            return Diagnosis(Fault.kernel, 7, reason, _get_names([case]))
        if right:
            reason = f"its values are wrong, and no kernel that is right uses {_join_names(only)}"
            return Diagnosis(Fault.simulator, 8, reason, _get_names([case]))
        reason = "its values are wrong; bundle more kernels that share its instructions"
        return Diagnosis(Fault.undecided, 9, reason, _get_names([case]))

    yield from _diagnose_by_instruction(
        clean, right, 6, "are wrong, and no kernel that is right does", diagnose
    )


def _diagnose_times(
    disagreeing: Sequence[CaseComparison], cases: Sequence[CaseComparison]
) -> Iterable[Diagnosis]:
    """Yield the faults of rule 10 for cases whose time is outside its bracket and whose outputs are not wrong.

    Args:
        disagreeing: Cases that do not agree and are not explained by rule 2.
        cases: A case for every program; those with a time inside clear their instructions.
    """
    outside = [case for case in disagreeing if case.inside is False and case.agreement is not Agreement.wrong]
    inside = [case for case in cases if case.inside]

    def diagnose(case: CaseComparison, only: set[str]) -> Diagnosis:
        low, high = (f"{ns / 1e3:.3f}" for ns in case.bracket_ns)
        reason = (
            f"its time on the device, {(case.device_ns or 0) / 1e3:.3f} us, is not from {low} to {high} us"
        )
        if inside and only:
            reason += f"; no kernel that keeps to its bracket uses {_join_names(only)}"
            return Diagnosis(Fault.simulator, 10, reason, _get_names([case]))
        if inside:
            reason += "; all of its instructions keep to their times elsewhere, so it is the schedule"
            return Diagnosis(Fault.simulator, 10, reason, _get_names([case]))
        return Diagnosis(
            Fault.undecided,
            10,
            f"{reason}; bundle more kernels that share its instructions",
            _get_names([case]),
        )

    yield from _diagnose_by_instruction(
        outside,
        inside,
        10,
        "have times outside of their brackets, and no kernel inside its own does",
        diagnose,
    )


def _diagnose_by_instruction(
    bad: Sequence[CaseComparison],
    good: Sequence[CaseComparison],
    rule: int,
    observation: str,
    diagnose: Callable[[CaseComparison, set[str]], Diagnosis],
) -> Iterable[Diagnosis]:
    """Yield one fault for all bad cases if they share instructions that no good case uses, else a fault for each.

    The one fault needs two or more bad cases and at least one good case.

    Args:
        bad: The cases to explain.
        good: The cases whose instructions are cleared.
        rule: Number of the rule in this module.
        observation: What the bad cases have in common, as the end of a sentence.
        diagnose: Returns the fault of a bad case, given its instructions that no good case uses.
    """
    cleared = {op for case in good for op in case.case.instructions.ops}
    suspects = {case.case.name: set(case.case.instructions.ops) - cleared for case in bad}
    shared = set.intersection(*suspects.values()) if len(bad) > 1 else set()
    if shared and good:
        reason = f"kernels that use {_join_names(shared)} {observation}"
        yield Diagnosis(Fault.simulator, rule, reason, _get_names(bad))
        return
    for case in bad:
        yield diagnose(case, suspects[case.case.name])


def _get_names(cases: Iterable[CaseComparison]) -> tuple[str, ...]:
    """Return the names of cases."""
    return tuple(case.case.name for case in cases)


def _join_names(names: Iterable[str]) -> str:
    """Return the first four names in sorted order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _MOST_NAMED} more" if len(ordered) > _MOST_NAMED else ""
    return ", ".join(ordered[:_MOST_NAMED]) + more

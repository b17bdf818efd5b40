"""Check of one kernel: run it, apply the detectors, compare it with its reference, and write files on failure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from nkw.errors import NkwError
from simulate.check import (
    Finding,
    convert_launch_error,
    detect,
    fails_a_check,
    format_text,
    gathered,
    sort_findings,
)
from simulate.level import Rules
from simulate.run import Launch, recorded
from simulate.run.exits import convert_exits
from simulate.testing.artifacts import write_artifacts
from simulate.testing.compare import Comparison, Mismatch, compare
from simulate.world import World

_VARIATIONS = 4  # orders and seeds that CheckLevel.all tries


class CheckLevel(Enum):
    """Detectors to apply: off, none; detect, those of `nkw check`; all, these and repetitions.

    With all, each launch is executed again in 4 legal orders and under 4 core schedules.
    """

    off = "off"
    detect = "detect"
    all = "all"


class KernelFailure(AssertionError):
    """Error for a kernel that breaks a rule, has findings, or differs from its reference.

    `folder` has the files of the failure, None if none were written.
    """

    def __init__(self, report: str, folder: Path | None) -> None:
        super().__init__(report if folder is None else f"{report}\nartefacts: {folder}")
        self.folder = folder


@dataclass(frozen=True)
class Checked:
    """Result of a kernel that passed its check.

    Attributes:
        outputs: What the kernel returned, for each rank.
        comparisons: Comparison of each output array with the truth, rank by rank.
        launches: The recorded launches; empty on the real package.
        findings: All findings, which were accepted or do not fail a check.
    """

    outputs: list[Any]
    comparisons: tuple[Comparison, ...]
    launches: tuple[Launch, ...]
    findings: tuple[Finding, ...]

    @property
    def output(self) -> Any:
        """What the kernel returned on the first rank: an array or a tuple of arrays."""
        return self.outputs[0]


@dataclass(frozen=True)
class KernelChecker:
    """Checker of kernels on one target.

    Attributes:
        target: trn1, inf2, trn2 or trn3; None is the chip of the environment, else trn2.
        level: Detectors to apply.
        backend: Result of `simulate.install`. With "neuron" the kernel runs on the real package, which has no
            detectors, on the chip of this machine.
        folder: Returns the folder for the files of a failure; with None no files are written.
    """

    target: str | None = None
    level: CheckLevel = CheckLevel.detect
    backend: str = "simulate"
    folder: Callable[[], Path] | None = field(default=None, compare=False)

    def __call__(
        self, kernel: Any, reference: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Checked:
        """Check a kernel on one rank: run `kernel(*arguments)` and compare it with `reference(*arguments)`.

        Args:
            kernel: The kernel, which gets copies of the arguments.
            reference: Gets the arguments, float arrays in float64, and returns an array or a tuple of arrays.
            arguments: The arguments.
            options: cores, allow, magnitude, contraction, roundings and through, as for `ranks`.

        Raises:
            KernelFailure: The kernel fails the check.
            UserExit: The reference ends the program.
        """
        return self.ranks(
            kernel, lambda rank_arguments: [reference(*rank_arguments[0])], [arguments], **options
        )

    def ranks(
        self,
        kernel: Any,
        reference: Callable[[list[tuple[Any, ...]]], Sequence[Any]],
        arguments: Sequence[tuple[Any, ...]],
        *,
        cores: int = 1,
        allow: Sequence[str] = (),
        magnitude: float | None = None,
        contraction: int = 0,
        roundings: int = 1,
        through: Any = None,
    ) -> Checked:
        """Check a kernel on several ranks, each with its arguments.

        The kernel gets copies of its arguments. It fails if it breaks a rule, has a finding that is not
        accepted, or returns an output beyond its tolerance.

        Args:
            kernel: The kernel.
            reference: Gets the arguments of all ranks, with float arrays in float64, and returns the expected
                output of each rank: an array, or a tuple of arrays.
            arguments: Arguments of each rank.
            cores: Physical cores of a rank (LNC).
            allow: Codes of accepted findings; with NKI_RULES=simulator all warnings are accepted.
            magnitude: As for `compare`, like contraction, roundings and through.

        Raises:
            KernelFailure: The kernel fails the check; on the simulator its folder has the report, streams,
                memory maps and a trace.
            UserExit: The reference ends the program.
        """
        run = self._run_neuron if self.backend == "neuron" else self._run_simulated
        outputs, launches, findings = run(
            kernel, [copy.deepcopy(rank_arguments) for rank_arguments in arguments], cores
        )
        accepted = {code.upper() for code in allow}
        tolerant = Rules.resolve() is Rules.simulator
        wrong = [
            finding
            for finding in findings
            if finding.code not in accepted and fails_a_check(finding, tolerant)
        ]
        if wrong:
            raise self._make_failure(format_text(wrong).rstrip(), wrong, launches)
        with convert_exits("the reference"):
            truths = list(
                reference(
                    [tuple(map(_widen, rank_arguments)) for rank_arguments in copy.deepcopy(list(arguments))]
                )
            )
        pairs = [
            (f"rank {rank} output {number}", np.asarray(output), np.asarray(truth))
            for rank, (got, wanted) in enumerate(zip(outputs, truths, strict=True))
            for number, (output, truth) in enumerate(_pair_results(got, wanted, self._make_failure, launches))
        ]
        comparisons = []
        for name, output, truth in pairs:
            try:
                comparisons.append(compare(output, truth, magnitude, contraction, roundings, through))
            except Mismatch as error:
                arrays = {"output": output, "truth": truth}
                raise self._make_failure(f"{name}: {error}", [], launches, arrays) from None
        return Checked(outputs, tuple(comparisons), tuple(launches), tuple(findings))

    def _run_simulated(
        self, kernel: Any, arguments: list[tuple[Any, ...]], cores: int
    ) -> tuple[list[Any], list[Launch], list[Finding]]:
        world = World(self.target, len(arguments), cores)
        launch_arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            (rank_arguments, {}) for rank_arguments in arguments
        ]
        variations = _VARIATIONS if self.level is CheckLevel.all else 0
        with recorded(refused=True, stopped=True) as launches:
            try:
                if self.level is CheckLevel.off:
                    return world.launch(kernel, launch_arguments).outputs, launches, []
                with gathered(variations, variations) as seen:
                    outputs = world.launch(kernel, launch_arguments).outputs
            except NkwError as error:
                finding = convert_launch_error(error)
                raise self._make_failure(str(finding), [finding], launches) from error
        findings = sort_findings(
            finding for launch, evidence in seen.launches for finding in detect(launch, evidence)
        )
        return outputs, launches, findings

    def _run_neuron(
        self, kernel: Any, arguments: list[tuple[Any, ...]], cores: int
    ) -> tuple[list[Any], list[Launch], list[Finding]]:
        return (
            [
                kernel(*rank_arguments) if cores == 1 else kernel[cores](*rank_arguments)
                for rank_arguments in arguments
            ],
            [],
            [],
        )

    def _make_failure(
        self,
        report: str,
        findings: Sequence[Finding],
        launches: Sequence[Launch],
        arrays: dict[str, np.ndarray] | None = None,
    ) -> KernelFailure:
        if self.folder is None:
            return KernelFailure(report, None)
        return KernelFailure(report, write_artifacts(self.folder(), report, findings, launches, arrays))


def _pair_results(
    got: Any, wanted: Any, failure: Callable[..., KernelFailure], launches: list[Launch]
) -> list[Any]:
    """Return the (output, truth) pairs of one rank.

    Args:
        got: What the kernel returned.
        wanted: What the reference returned.
        failure: Makes the error.
        launches: The launches, for the files of the error.

    Raises:
        KernelFailure: The numbers of arrays differ.
    """
    outputs, truths = (
        list(returned) if isinstance(returned, (tuple, list)) else [returned] for returned in (got, wanted)
    )
    if len(outputs) != len(truths):
        report = (
            f"the kernel returns {len(outputs)} arrays, the reference {len(truths)}; return as many from both"
        )
        raise failure(report, [], launches)
    return list(zip(outputs, truths))


def _widen(argument: Any) -> Any:
    """Return an array of floats in float64; other arrays and values are returned unchanged."""
    if isinstance(argument, np.ndarray) and argument.dtype.kind not in "biu":
        return argument.astype(np.float64)
    return argument

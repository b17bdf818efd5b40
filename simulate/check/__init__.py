"""Detectors: findings about a launch, whether it ran to its end or stopped.

A detector is a pure function `detect` of a `Launch` and of the `Evidence` that was gathered while it ran.
Each module of this folder that defines such a function is a group of detectors; its docstring begins with the
name of the group. `deadlocks` explains why cores wait for each other. `orders` and `interleavings` execute a
launch again on request. `lint` reads source code. The commands `check` and `verify` and the fixture
`check_kernel` call `gathered` and `collect_findings`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from nkw.errors import Deadlock, NkwError, RendezvousMismatch
from simulate.check.deadlocks import explain_deadlock
from simulate.check.evidence import Evidence
from simulate.check.findings import (
    KINDS,
    Finding,
    Severity,
    convert_error,
    fails_a_check,
    format_text,
    sort_findings,
)
from simulate.check.formats import Format, render
from simulate.check.gather import Gatherer, gathered
from simulate.level import Rules
from simulate.run import Launch

DETECTORS: dict[str, Callable[[Launch, Evidence], list[Finding]]] = {
    file.name: module.detect
    for file in pkgutil.iter_modules(__path__)
    if file.name != "commands" and not file.ispkg
    for module in [importlib.import_module(f"{__name__}.{file.name}")]
    if hasattr(module, "detect")
} | {
    "varied": lambda launch, evidence: evidence.varied,
    "tolerated": lambda launch, evidence: list(map(convert_error, launch.tolerated)),
}
"""The `detect` of every file of this folder that has one, the findings of launches that were executed again, and the
broken rules that a launch tolerated."""


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return the findings of all detectors about one launch, without repetitions.

    The order is errors first, then by file, line, code and text. Under the rules of the vendor's simulator
    (`--rules simulator`) every finding is a warning, because that simulator has no such detectors.
    """
    findings = [finding for look in DETECTORS.values() for finding in look(launch, evidence)]
    if launch.rules is Rules.simulator:
        findings = [replace(finding, severity=Severity.warning) for finding in findings]
    return sort_findings(findings)


def examine(launching: Callable[[], object], orders: int = 0, seeds: int = 0) -> list[Finding]:
    """Call a function and return the findings of all launches that it makes, errors first, then by file and line.

    An NkwError that stops a launch becomes a finding, also one that leaves the function.

    Args:
        launching: The function to call, without arguments; what it returns is ignored.
        orders: Number of legal orders of its instructions in which each launch is executed again.
        seeds: Number of random core schedules under which each launch of several cores is repeated.

    Raises:
        InvalidArgument: orders or seeds is negative.
        Exception: Any error of the function that is not an NkwError.
    """
    with gathered(orders, seeds) as seen:
        try:
            launching()
        except NkwError as error:
            if error not in seen.errors:
                seen.errors.append(error)
    return collect_findings(seen)


def collect_findings(
    seen: Gatherer, progress: Callable[[Sequence[Any], str], Iterable[Any]] = lambda launches, _: launches
) -> list[Finding]:
    """Return the findings of all gathered launches, and of the errors that stopped launches, errors first.

    Args:
        seen: The observer that `gathered` yielded.
        progress: Gets the (launch, evidence) pairs and a title, and yields the pairs; shows progress in a
            terminal.
    """
    findings = list(map(convert_launch_error, seen.errors))
    for launch, evidence in progress(seen.launches, "detectors"):
        findings += detect(launch, evidence)
    return sort_findings(findings)


def convert_launch_error(error: NkwError) -> Finding:
    """Convert an error that stopped a kernel into a finding.

    A deadlock, or a rendezvous whose members disagree, gets a hint about its likely cause. A read of
    unwritten shared HBM gets `nisa.core_barrier` as its hint. Any other error keeps its own hint.
    """
    if isinstance(error, (Deadlock, RendezvousMismatch)):
        return explain_deadlock(error)
    finding = convert_error(error)
    if error.code == "NKW-UNWRITTEN" and "in shared_hbm" in finding.message:
        # The simulator runs one core at a time: without a barrier the other core may not have written yet.
        hint = "if the other core writes it, put nisa.core_barrier(data=…, cores=(0, 1)) before the read"
        return replace(finding, hint=hint)
    return finding


__all__ = [
    "DETECTORS",
    "KINDS",
    "Evidence",
    "Finding",
    "Format",
    "Gatherer",
    "Severity",
    "collect_findings",
    "convert_launch_error",
    "detect",
    "examine",
    "fails_a_check",
    "format_text",
    "gathered",
    "render",
    "sort_findings",
]

"""Detectors: findings about a launch, whether it ran to its end or stopped.

A detector is a pure function `detect` of a `Launch` and of the `Evidence` that was gathered while it ran. Every file of
this folder with such a function is a family of detectors; its first line names what it finds. `deadlocks` explains why
cores wait for each other. `orders` and `interleavings` execute a launch again on request. `lint` reads source code.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from nkw.errors import Deadlock, NkwError, RendezvousMismatch
from simulate.check.deadlocks import explain
from simulate.check.evidence import Evidence
from simulate.check.findings import KINDS, Finding, Severity, fails_a_check, from_error, in_order, text
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
    "tolerated": lambda launch, evidence: list(map(from_error, launch.tolerated)),
}
"""The `detect` of every file of this folder that has one, the findings of launches that were executed again, and the
broken rules that a launch tolerated."""


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """The findings of all detectors about one launch, in a fixed order.

    Under the rules of the vendor's simulator, which detects none of them, each is a warning.
    """
    findings = [finding for look in DETECTORS.values() for finding in look(launch, evidence)]
    if launch.rules is Rules.simulator:
        findings = [replace(finding, severity=Severity.warning) for finding in findings]
    return in_order(findings)


def examine(launching: Callable[[], object], orders: int = 0, seeds: int = 0) -> list[Finding]:
    """The findings of all launches that a call makes; an error that stops one of them is a finding too.

    orders and seeds: as for `gathered`. Raises every error of the call that is not an NkwError.
    """
    with gathered(orders, seeds) as seen:
        try:
            launching()
        except NkwError as error:
            if error not in seen.errors:
                seen.errors.append(error)
    return findings_of(seen)


def findings_of(
    seen: Gatherer, progress: Callable[[Sequence[Any], str], Iterable[Any]] = lambda launches, _: launches
) -> list[Finding]:
    """The findings of all gathered launches, and of the errors that stopped launches.

    `progress` gets the launches and a name for the work, and yields the launches.
    """
    findings = list(map(finding_of, seen.errors))
    for launch, evidence in progress(seen.launches, "detectors"):
        findings += detect(launch, evidence)
    return in_order(findings)


def finding_of(error: NkwError) -> Finding:
    """The finding of an error that stopped a kernel."""
    if isinstance(error, (Deadlock, RendezvousMismatch)):
        return explain(error)
    finding = from_error(error)
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
    "detect",
    "examine",
    "fails_a_check",
    "finding_of",
    "findings_of",
    "gathered",
    "in_order",
    "render",
    "text",
]

"""Detectors: functions that read a launch, complete or stopped by an error, and report findings.

A detector is a pure function of a `Launch` and of the `Evidence` that was gathered while it ran. Each has a file:
`placement` (tiles with overlapping explicit addresses), `engine_state` (registers and generators used before they are
set), `stale` (unread results and stale data), `ordering_requests`, `loops` (bodies of device loops), `race` (unordered
accesses), `outputs` (inputs and outputs), `values` (numbers that the chip does not hold), `accumulation` (sums in
PSUM), `loop_carried` (iterations of affine_range, Beta 1 code). `deadlocks` explains why cores wait for each other.
`orders` and `interleavings` execute a launch again, on request. `lint` reads source code instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from simulate.check import (
    accumulation,
    engine_state,
    loop_carried,
    loops,
    ordering_requests,
    outputs,
    placement,
    race,
    stale,
    values,
)
from simulate.check.deadlocks import explain
from simulate.check.evidence import Evidence
from simulate.check.findings import KINDS, Finding, Severity, from_error, in_order, text
from simulate.check.formats import Format, render
from simulate.check.gather import Gatherer, gathered
from simulate.errors import Deadlock, NkwError, RendezvousMismatch
from simulate.run import Launch

DETECTORS: dict[str, Callable[[Launch, Evidence], list[Finding]]] = {
    "mem": placement.detect,
    "init": engine_state.detect,
    "stale": stale.detect,
    "order": ordering_requests.detect,
    "loops": loops.detect,
    "race": race.detect,
    "out": outputs.detect,
    "values": values.detect,
    "device": accumulation.detect,
    "carried": loop_carried.detect,
    "varied": lambda launch, evidence: evidence.varied,
}


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """The findings of all detectors about one launch, in a fixed order."""
    return in_order(finding for look in DETECTORS.values() for finding in look(launch, evidence))


def examine(launching: Callable[[], object], orders: int = 0, seeds: int = 0) -> list[Finding]:
    """The findings about all launches that a call makes; an error that stops a launch is a finding too.

    orders and seeds: as for `gathered`. Raises every error of the call that is not an NkwError.
    """
    with gathered(orders, seeds) as seen:
        try:
            launching()
        except NkwError as error:
            if error not in seen.errors:
                seen.errors.append(error)
    return findings_of(seen)


def findings_of(seen: Gatherer) -> list[Finding]:
    """The findings about all gathered launches, and the errors that stopped launches."""
    findings = list(map(finding_of, seen.errors))
    for launch, evidence in seen.launches:
        findings += detect(launch, evidence)
    return in_order(findings)


def finding_of(error: NkwError) -> Finding:
    """An error that stopped a kernel, as a finding."""
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
    "finding_of",
    "findings_of",
    "gathered",
    "in_order",
    "render",
    "text",
]

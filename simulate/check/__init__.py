"""Detectors: what a launch that ran to its end, or that stopped, says about the chip.

A detector is a pure function of a `Launch` and of the `Evidence` that was gathered while it ran. Families, one file
each: `mem` overlap of tiles with explicit addresses; `init` registers and generators used before they are set;
`stale` results that nothing read and data left over; `order` ordering requests; `loops` bodies of device loops;
`race` unordered accesses; `sync` why cores wait in vain; `out` inputs and outputs; `values` numbers the chip does not
hold; `device` known divergences between simulation and chip, and `carried` those of loops and of Beta 1. `orders` and
`interleavings` carry a launch out again, where that is asked for. `lint` looks at source code instead.
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
    """Everything that the detectors find in one launch, in a fixed order."""
    return in_order(finding for look in DETECTORS.values() for finding in look(launch, evidence))


def examine(launching: Callable[[], object], orders: int = 0, seeds: int = 0) -> list[Finding]:
    """What is found in all launches that a call makes; what stops one of them is a finding too.

    orders and seeds: as for `gathered`. Passes on what the call raises, unless a kernel broke a rule.
    """
    with gathered(orders, seeds) as seen:
        try:
            launching()
        except NkwError as error:
            if error not in seen.errors:
                seen.errors.append(error)
    return findings_of(seen)


def findings_of(seen: Gatherer) -> list[Finding]:
    """What is found in everything that was gathered, and what stopped launches."""
    findings = list(map(finding_of, seen.errors))
    for launch, evidence in seen.launches:
        findings += detect(launch, evidence)
    return in_order(findings)


def finding_of(error: NkwError) -> Finding:
    """What stopped a kernel, as a finding."""
    if isinstance(error, (Deadlock, RendezvousMismatch)):
        return explain(error)
    finding = from_error(error)
    if error.code == "NKW-UNWRITTEN" and "in shared_hbm" in finding.message:
        # Cores run one at a time: what the other core writes without a barrier may not be there yet.
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

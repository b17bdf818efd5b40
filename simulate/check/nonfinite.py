"""`nonfinite`: NaN and infinities that a kernel makes out of finite operands and returns.

A birth is the instruction that makes such values; an arrival is an output that contains some of them.
"""

from __future__ import annotations

from collections import defaultdict

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, Touch, describe_access, make_finding, register_kind
from simulate.check.observed_nonfinite import Arrival, Birth
from simulate.run import Launch
from simulate.run.stream import READ, Stream

BORN = register_kind(
    "NKW-NONFINITE",
    Severity.warning,
    "An output contains no NaN and no infinity that an instruction makes out of finite operands.",
)
_HINTS = {
    "exp": "subtract the row's largest element before exp, so that no argument is above 0",
    "log": "add a small constant to the argument, or clip it at one",
    "rsqrt": "add a small constant to the argument, or clip it at one",
    "sqrt": "clip the argument at 0",
}
_NAN_HINT = (
    "look for 0 times infinity, infinity minus infinity, 0 / 0, or a root or logarithm of a negative number"
)
_INFINITE_HINT = (
    "look for a division by zero, an exponential or a product that overflows; scale or clip before"
)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return one finding for each line whose NaN or infinities reach an output.

    A line that a finding of `values` names, for an overflow or an argument outside of a function's range, is not
    reported.
    """
    findings: list[Finding] = []
    by_line: dict[tuple[int, int, int], list[Arrival]] = defaultdict(list)
    for arrival in evidence.nonfinite.arrivals:
        stream = arrival.birth.stream
        by_line[stream.rank, stream.core, stream.line_ids[arrival.birth.event]].append(arrival)
    for arrivals in by_line.values():
        first = min(arrivals, key=lambda arrival: arrival.birth.event)
        if first.birth.event not in _find_reported_events(evidence, first.birth.stream):
            findings.append(_report_birth(launch, first))
    return findings


def _find_reported_events(evidence: Evidence, stream: Stream) -> set[int]:
    """Return the events of a core that findings of the detector `values` already name."""
    values = evidence.get_core(stream).values
    overflows = (*values.overflowing_halves, *values.overflowing_fp8)
    return {note.event for note in (*overflows, *values.outside_domain, *values.spread_by_transpose)}


def _report_birth(launch: Launch, arrival: Arrival) -> Finding:
    birth = arrival.birth
    stream = birth.stream
    made = stream.event(birth.event)
    output = stream.tensors[arrival.tensor]
    result = next(a for a in made.accesses if a.tensor == birth.tensor and a.mode != READ)
    function = f"{made.op} of {birth.function}" if birth.function else made.op
    return make_finding(
        BORN,
        f"{function} makes {birth.seen}, and no operand explains them; {arrival.count} elements of the output "
        f"{output.name} {output.shape} {output.dtype} are not finite because of them",
        made.where,
        (describe_access(stream, birth.event, result), *_find_store(launch, arrival)),
        hint=_choose_hint(birth),
    )


def _choose_hint(birth: Birth) -> str:
    return _HINTS.get(birth.function) or (_NAN_HINT if birth.is_nan else _INFINITE_HINT)


def _find_store(launch: Launch, arrival: Arrival) -> tuple[Touch, ...]:
    """Return the last write of the output in the launch, empty if it is the birth itself.

    Empty as well if no instruction wrote the output.
    """
    for stream in launch.streams:
        if stream.rank != arrival.rank:
            continue
        for event in range(len(stream) - 1, -1, -1):
            for access in stream.accesses(event):
                if access.tensor == arrival.tensor and access.mode != READ:
                    same = stream is arrival.birth.stream and event == arrival.birth.event
                    return () if same else (describe_access(stream, event, access),)
    return ()

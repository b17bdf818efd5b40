"""`loops`: bodies of device loops that run in the simulator and not on the device.

The simulator runs the Python body in every iteration. The device runs one compiled body in all of them. Therefore tiles
of the body are lost when an iteration ends, and Python values keep what they were when the body was compiled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.memory import MemoryRegion
from simulate.run import Launch
from simulate.run.stream import Access, Stream

ESCAPED = register_kind(
    "NKW-LOOP-TILE",
    Severity.error,
    "A tensor that an iteration of a device loop allocates is used in that iteration only.",
)
CARRIED = register_kind(
    "NKW-LOOP-CARRIED",
    Severity.error,
    "The body of a device loop is compiled once; Python values that change between iterations keep the first value.",
)

Signature = tuple[str, int, tuple[object, ...]]
"""Instruction, line id, and (tensor, box) of every operand of an event; equal in all iterations of a correct loop."""


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return findings for tiles used outside of their iteration, and for iterations that differ by Python values."""
    findings: list[Finding] = []
    for stream in launch.streams:
        if stream.loops:
            accesses = evidence.get_core(stream).accesses
            findings += _find_escaped(stream, accesses)
            findings += _find_carried(stream, accesses)
    return findings


def _find_escaped(stream: Stream, accesses: Sequence[tuple[Access, ...]]) -> list[Finding]:
    findings = []
    lines: set[int] = set()
    for event, operands in enumerate(accesses):
        iterations = stream.loops.get(event, ())
        for access in operands:
            allocated_in = stream.made_in.get(access.tensor, ())
            if iterations[: len(allocated_in)] == allocated_in or stream.line_ids[event] in lines:
                continue
            lines.add(stream.line_ids[event])
            record = stream.tensors[access.tensor]
            after = "in a later iteration" if len(iterations) >= len(allocated_in) else "after the loop"
            findings.append(
                make_finding(
                    ESCAPED,
                    f"{record.name} {record.shape}, allocated in an iteration of a device loop at {record.where}, is "
                    f"used {after}; on the device it exists in its own iteration only",
                    stream.event(event).where,
                    [describe_access(stream, event, access)],
                    hint="allocate it before the loop",
                )
            )
    return findings


def _find_carried(stream: Stream, accesses: Sequence[tuple[Access, ...]]) -> list[Finding]:
    findings = []
    bodies: dict[tuple[int, ...], dict[int, list[int]]] = defaultdict(dict)
    for event, path in stream.loops.items():
        loop = (*path[:-1], stream.iterations[path[-1]])
        bodies[loop].setdefault(path[-1], []).append(event)
    for iterations in bodies.values():
        first, *later = iterations.values()
        expected = list(_compute_signatures(stream, accesses, first))
        for number, events in enumerate(later, 2):
            different = _find_first_difference(
                expected, list(_compute_signatures(stream, accesses, events)), first, events
            )
            if different is not None:
                findings.append(
                    make_finding(
                        CARRIED,
                        f"iteration {number} of a device loop differs from the first one: "
                        f"{_format_event(stream, different)} is another instruction, or has other operands; the "
                        "device runs one compiled body in all iterations",
                        stream.event(different).where,
                        [describe_access(stream, different, a) for a in accesses[different][-1:]],
                        hint="address by the loop counter, scalar_offset=…; keep what varies in a tile or a register",
                    )
                )
                break
    return findings


def _compute_signatures(
    stream: Stream, accesses: Sequence[tuple[Access, ...]], events: list[int]
) -> Iterator[Signature]:
    """Yield the signature of each event of one iteration: instruction, line id, and (tensor, box) of every operand.

    Tensors that iterations allocate, and registers, are replaced by negative numbers in order of use, so that
    the signatures of equal iterations compare equal.
    """
    numbers: dict[int, int] = {}
    for event in events:
        operands: list[object] = []
        for access in accesses[event]:
            is_register = stream.tensors[access.tensor].buffer is MemoryRegion.register
            is_numbered = is_register or access.tensor in stream.made_in
            tensor = -1 - numbers.setdefault(access.tensor, len(numbers)) if is_numbered else access.tensor
            operands.append((tensor, *access[1:]))
        yield stream.op_names[stream.ops[event]], stream.line_ids[event], tuple(operands)


def _find_first_difference(
    expected: list[Signature], seen: list[Signature], first: list[int], events: list[int]
) -> int | None:
    """Return the first event at which an iteration differs from the first iteration, None if the two are equal.

    It is an event of the later iteration. If that iteration ends early, it is the first event of the first
    iteration that has no counterpart.

    Args:
        expected: The signatures of the first iteration.
        seen: The signatures of the later iteration.
        first: The events of the first iteration.
        events: The events of the later iteration.
    """
    for index, (first_signature, signature) in enumerate(zip(expected, seen)):
        if first_signature != signature:
            return events[index]
    if len(seen) > len(expected):
        return events[len(expected)]
    return first[len(seen)] if len(seen) < len(expected) else None


def _format_event(stream: Stream, event: int) -> str:
    return f"{stream.op_names[stream.ops[event]]} #{event}"

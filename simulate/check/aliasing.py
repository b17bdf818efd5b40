"""`aliasing`: instructions of an engine that write elements which they also read at another position.

An engine streams elements and writes the first results before it has read the last operands. The reference allows an
operand as the result for a few instructions, element by element; it says nothing of shifted or transposed results.
The simulator reads all operands first.
"""

from __future__ import annotations

import numpy as np

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.check.footprint import static_footprint
from simulate.isa import propagation
from simulate.isa.enums import Engine
from simulate.isa.template import Template
from simulate.run import Launch
from simulate.run.stream import Stream

SHIFTED = register_kind(
    "NKW-ALIAS-SHIFTED",
    Severity.warning,
    "A result overlaps an operand only at equal positions; an engine writes results before it has read all operands.",
)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return one finding for each line whose result overlaps one of its operands at other positions, core by core."""
    findings: list[Finding] = []
    for stream in launch.streams:
        findings += _find_shifted(stream)
    return findings


def _find_shifted(stream: Stream) -> list[Finding]:
    pairs = [_list_streamed_pairs(template) for template in stream.templates]
    collides: dict[tuple[int, int, int], bool] = {}  # by template, operand and result
    findings: list[Finding] = []
    reported_lines: set[int] = set()
    for event, number in enumerate(stream.template_ids):
        line = stream.line_ids[event]
        if not pairs[number] or line in reported_lines:
            continue
        tensors = stream.tensors_of(event)
        for source, target in pairs[number]:
            if tensors[source] != tensors[target]:
                continue
            key = number, source, target
            if key not in collides:
                collides[key] = _has_shifted_overlap(stream.templates[number], source, target)
            if not collides[key]:
                continue
            reported_lines.add(line)
            accesses = stream.accesses(event)
            record = stream.tensors[tensors[source]]
            findings.append(
                make_finding(
                    SHIFTED,
                    f"{stream.event(event).op} reads {record.name} {record.shape} and writes the same bytes at other "
                    "positions; an engine writes results before it has read all operands",
                    stream.event(event).where,
                    [describe_access(stream, event, accesses[index]) for index in (source, target)],
                    hint="write to a second tile",
                )
            )
            break
    return findings


def _list_streamed_pairs(template: Template) -> list[tuple[int, int]]:
    """Return every (operand, result) pair of an instruction whose elements an engine streams, overlapping or not.

    Both are operand indices of the template, and the operand is on chip. Neither tensors nor addresses are compared.
    The list is empty for DMAs, for synchronisation, for views with run-time addresses, and for instructions that are
    neither element by element nor transposes.
    """
    plan = template.plan
    # A shuffle of partitions may be in place, as its page says; gathers and searches state nothing.
    streams = plan.propagate in (propagation.elementwise, propagation.transposed)
    if not streams or not template.direct or plan.engine in (Engine.dma, Engine.sync):
        return []
    return [
        (source, target)
        for source in template.reads
        for target in template.writes
        if template.operands[source].buffer.on_chip
    ]


def _has_shifted_overlap(template: Template, operand: int, result: int) -> bool:
    """Return whether a result, in the tensor of an operand, overlaps the operand other than element on element.

    Args:
        template: The template of the instruction.
        operand: Index of the operand in the template.
        result: Index of the result in the template.
    """
    source, target = template.operands[operand], template.operands[result]
    moves = template.plan.propagate is propagation.transposed
    if source.layout.form is not target.layout.form or source.free_size == 1 or target.free_size == 1:
        return False
    if source.dtype.itemsize != target.dtype.itemsize and source.offset == target.offset == 0:
        return False  # a narrower result stays behind the elements that are still to be read
    if source.layout is target.layout and not moves:
        return False
    reads, writes = static_footprint(0, source.layout), static_footprint(0, target.layout)
    if not reads.meets(writes):
        return False
    return moves or not np.array_equal(reads.ordered_ids(), writes.ordered_ids())

"""`lost`: results that an instruction computes and that are overwritten before anything reads them.

`stale` compares DMAs with DMAs and matmuls with matmuls by the bytes that they leave. This detector follows every other
pair of writes on chip, and stores to HBM that overlap. A write without operands (a memset, an iota, random numbers)
loses nothing where it is overwritten.
"""

from __future__ import annotations

from simulate.check.evidence import CoreEvidence, Evidence
from simulate.check.findings import Finding, Severity, found, kind, touch
from simulate.check.flow import Flow, find_live, has_other_effects, is_move
from simulate.isa.enums import ReduceCmd
from simulate.run import Launch
from simulate.run.stream import READ, Access, Stream

OVERWRITTEN = kind(
    "NKW-LOST",
    Severity.warning,
    "A result that an instruction computes is read before another instruction overwrites all of it.",
)
STORED_TWICE = kind(
    "NKW-STORE-LOST",
    Severity.warning,
    "Different results that DMAs store to HBM go to different places, unless the first one is read before.",
)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return one finding for each line that overwrites a result unread, core by core."""
    findings: list[Finding] = []
    for stream in launch.streams:
        seen = evidence.of(stream)
        findings += _overwritten(stream, seen.flow, find_live(stream, seen.accesses, seen.flow))
        findings += _stored_twice(stream, seen)
    return findings


def _overwritten(stream: Stream, flow: Flow, live: set[int]) -> list[Finding]:
    used_lines = {stream.line_ids[event] for event in live}
    findings: list[Finding] = []
    said: set[int] = set()
    for write, event, access in flow.overwritten:
        line = stream.line_ids[event]
        if line in said or flow.unread_writes[write.event] < len(stream.template(write.event).writes):
            continue
        if not _is_lost(stream, flow, live, write.event, event, used_lines):
            continue
        said.add(line)
        record = stream.tensors[access.tensor]
        findings.append(
            found(
                OVERWRITTEN,
                f"{stream.event(event).op} overwrites what {stream.event(write.event).op} wrote to {record.name} "
                f"{record.shape}, and nothing read it",
                stream.event(event).where,
                (touch(stream, write.event, write.access), touch(stream, event, access)),
                hint="read the first result, write the second one elsewhere, or drop the first instruction",
            )
        )
    return findings


def _is_lost(
    stream: Stream, flow: Flow, live: set[int], first: int, second: int, used_lines: set[int]
) -> bool:
    """Return whether an overwritten result is a loss, and not a value that is reset or exists elsewhere."""
    one, other = stream.template(first), stream.template(second)
    if not one.plan.reads or has_other_effects(stream, first):
        return False
    registers = other.plan.registers
    if (
        one.plan.registers is not None
        and registers is not None
        and registers.command is not ReduceCmd.reset_reduce
    ):
        return False  # the accumulator registers carry the first result on to the second
    if one.plan.effects.copies and not other.plan.effects.copies:
        return False  # a load that is not needed: its source is still in HBM
    copies = one.plan.effects.copies and other.plan.effects.copies
    sums = one.plan.effects.sums_products and other.plan.effects.sums_products
    if sums or (copies and one.operands[one.writes[0]].layout is other.operands[other.writes[0]].layout):
        return False  # `stale` judges these by their bytes
    again = stream.line_ids[first] == stream.line_ids[second]
    moved = is_move(one) or not other.plan.reads or (stream.line_ids[first] in used_lines and not again)
    if not moved:
        return True
    # The last round of a loop may prepare values for a round that does not come. Nothing is lost unless an operand's
    # own instruction becomes useless with it.
    return any(producer not in live for producer in flow.producers.get(first, ()))


def _stored_twice(stream: Stream, seen: CoreEvidence) -> list[Finding]:
    """Return findings for stores that overlap earlier ones with other bits; `stale` judges stores to one view."""
    findings: list[Finding] = []
    said: set[int] = set()
    for lost in seen.stores.lost:
        line = stream.line_ids[lost.second]
        if line in said or seen.written.get(lost.first) == seen.written.get(lost.second) is not None:
            continue
        said.add(line)
        record = stream.tensors[lost.tensor]
        findings.append(
            found(
                STORED_TWICE,
                f"{stream.event(lost.second).op} changes {lost.count} of the {lost.size} elements of {record.name} "
                f"{record.shape} that it stores; an earlier store wrote these elements, and nothing read them",
                stream.event(lost.second).where,
                (
                    touch(stream, lost.first, _result(stream, lost.first, lost.tensor)),
                    touch(stream, lost.second, _result(stream, lost.second, lost.tensor)),
                ),
                hint="advance the destination by the number of rows or columns that a store writes",
            )
        )
    return findings


def _result(stream: Stream, event: int, tensor: int) -> Access:
    return next(each for each in stream.accesses(event) if each.tensor == tensor and each.kind != READ)

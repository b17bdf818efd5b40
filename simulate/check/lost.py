"""`lost`: results that an instruction computes and that are overwritten before anything reads them.

`stale` compares DMAs with DMAs and matmuls with matmuls by the bytes that they store. This detector follows
every other pair of writes on chip, and stores to HBM that overlap. Overwriting a write without operands (a
memset, an iota, random numbers) is no loss. A live event is one whose results reach HBM, a register or
another core.
"""

from __future__ import annotations

from simulate.check.evidence import CoreEvidence, Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.check.flow import Flow, find_live, has_other_effects, is_move
from simulate.isa.enums import ReduceCmd
from simulate.run import Launch
from simulate.run.stream import READ, Access, Stream

OVERWRITTEN = register_kind(
    "NKW-LOST",
    Severity.warning,
    "A result that an instruction computes is read before another instruction overwrites all of it.",
)
STORED_TWICE = register_kind(
    "NKW-STORE-LOST",
    Severity.warning,
    "A DMA does not store other values over elements of HBM that an earlier DMA stored and nothing has read.",
)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return one finding for each line that overwrites a result before anything has read it, core by core."""
    findings: list[Finding] = []
    for stream in launch.streams:
        seen = evidence.get_core(stream)
        findings += _find_overwritten(stream, seen.flow, find_live(stream, seen.accesses, seen.flow))
        findings += _find_stored_twice(stream, seen)
    return findings


def _find_overwritten(stream: Stream, flow: Flow, live: set[int]) -> list[Finding]:
    used_lines = {stream.line_ids[event] for event in live}
    findings: list[Finding] = []
    reported_lines: set[int] = set()
    for write, event, access in flow.overwritten:
        line = stream.line_ids[event]
        if line in reported_lines or flow.unread_writes[write.event] < len(
            stream.template(write.event).writes
        ):
            continue
        if not _is_lost(stream, flow, live, write.event, event, used_lines):
            continue
        reported_lines.add(line)
        record = stream.tensors[access.tensor]
        findings.append(
            make_finding(
                OVERWRITTEN,
                f"{stream.event(event).op} overwrites what {stream.event(write.event).op} wrote to {record.name} "
                f"{record.shape}, and nothing read it",
                stream.event(event).where,
                (describe_access(stream, write.event, write.access), describe_access(stream, event, access)),
                hint="read the first result, write the second one elsewhere, or drop the first instruction",
            )
        )
    return findings


def _is_lost(
    stream: Stream, flow: Flow, live: set[int], first: int, second: int, used_lines: set[int]
) -> bool:
    """Return whether an overwritten result is lost: it was no constant, and its value exists nowhere else.

    Args:
        stream: The stream of the core.
        flow: Its data flow.
        live: The events whose results reach HBM, a register or another core.
        first: The event whose write is overwritten.
        second: The event that overwrites it.
        used_lines: The ids of the lines of live events.
    """
    one, other = stream.template(first), stream.template(second)
    if not one.plan.reads or has_other_effects(stream, first):
        return False
    registers = other.plan.registers
    if (
        one.plan.registers is not None
        and registers is not None
        and registers.command is not ReduceCmd.reset_reduce
    ):
        return False  # the accumulator registers pass the first sum on to the second
    if one.plan.effects.copies and not other.plan.effects.copies:
        return False  # a load that is not needed: its source is still in HBM
    copies = one.plan.effects.copies and other.plan.effects.copies
    sums = one.plan.effects.sums_products and other.plan.effects.sums_products
    if sums or (copies and one.operands[one.writes[0]].layout is other.operands[other.writes[0]].layout):
        return False  # `stale` compares the bytes of these
    is_same_line = stream.line_ids[first] == stream.line_ids[second]
    is_recoverable = (
        is_move(one) or not other.plan.reads or (stream.line_ids[first] in used_lines and not is_same_line)
    )
    if not is_recoverable:
        return True
    # The last iteration of a loop may prepare values for an iteration that does not come. Nothing is lost unless the
    # instruction that wrote an operand becomes useless as well.
    return any(producer not in live for producer in flow.producers.get(first, ()))


def _find_stored_twice(stream: Stream, seen: CoreEvidence) -> list[Finding]:
    """Return a finding for each line whose store changes bits that an earlier store wrote and nothing has read.

    Two stores to equal views are left to `stale`.
    """
    findings: list[Finding] = []
    reported_lines: set[int] = set()
    for lost in seen.stores.lost:
        line = stream.line_ids[lost.second]
        if (
            line in reported_lines
            or seen.written.get(lost.first) == seen.written.get(lost.second) is not None
        ):
            continue
        reported_lines.add(line)
        record = stream.tensors[lost.tensor]
        findings.append(
            make_finding(
                STORED_TWICE,
                f"{stream.event(lost.second).op} changes {lost.count} of the {lost.size} elements of {record.name} "
                f"{record.shape} that it stores; an earlier store wrote these elements, and nothing read them",
                stream.event(lost.second).where,
                (
                    describe_access(stream, lost.first, _find_write(stream, lost.first, lost.tensor)),
                    describe_access(stream, lost.second, _find_write(stream, lost.second, lost.tensor)),
                ),
                hint="advance the destination by the number of rows or columns that a store writes",
            )
        )
    return findings


def _find_write(stream: Stream, event: int, tensor: int) -> Access:
    return next(
        access for access in stream.accesses(event) if access.tensor == tensor and access.mode != READ
    )

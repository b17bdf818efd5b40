"""`lost`: results that an instruction computes on chip and that are overwritten or left before anything reads them.

`stale` compares DMAs with DMAs and matmuls with matmuls by the bytes that they leave. This detector follows every other
pair of writes through the stream, and results that nothing reads until the kernel ends. A write without operands (a
memset, an iota, random numbers) loses nothing where it is overwritten.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from simulate.check.evidence import CoreEvidence, Evidence
from simulate.check.findings import Finding, Severity, found, kind, touch
from simulate.isa.shapes import unchanged
from simulate.isa.template import Template
from simulate.memory import MemoryRegion
from simulate.memory.extents import Box, contains, meets
from simulate.run import Launch
from simulate.run.stream import ACCUMULATE, READ, Access, Stream

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
UNUSED = kind(
    "NKW-RESULT-UNUSED",
    Severity.warning,
    "A tile that an instruction computes or loads is read by some later instruction.",
)


@dataclass(slots=True)
class _Write:
    """A write that nothing has read so far: its event and operand, and the box that no later write covers."""

    event: int
    access: Access
    left: Box
    is_read: bool = False


@dataclass
class _Flow:
    """Which event reads the results of which, in one core, and which results were overwritten unread."""

    producers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    overwritten: list[tuple[_Write, int, Access]] = field(default_factory=list)
    read_sources: set[tuple[int, str]] = field(default_factory=set)
    """Lines and instructions of which some event writes what another event reads."""


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return one finding for each line whose results are overwritten or left unread, core by core."""
    findings: list[Finding] = []
    for stream in launch.streams:
        accesses = evidence.of(stream).accesses
        flow = _follow(stream, accesses)
        live = _live(stream, accesses, flow)
        findings += _overwritten(stream, flow, live)
        findings += _unused(stream, accesses, flow)
        findings += _stored_twice(stream, evidence.of(stream))
    return findings


def _follow(stream: Stream, accesses: list[tuple[Access, ...]]) -> _Flow:
    flow = _Flow()
    current: dict[int, list[_Write]] = defaultdict(
        list
    )  # by tensor, the writes of which a part is still there
    on_chip = [record.buffer in (MemoryRegion.sbuf, MemoryRegion.psum) for record in stream.tensors]
    for event, operands in enumerate(accesses):
        template = stream.template(event)
        adds = stream.accumulated.get(event, True) is not False
        boxes = _boxes(template)
        for access, box in zip(operands, boxes):
            if access.kind == READ or (access.kind == ACCUMULATE and adds):
                for write in current.get(access.tensor, ()):
                    if box is None or meets(box, write.left):
                        write.is_read = True
                        flow.producers[event].add(write.event)
                        flow.read_sources.add(_source(stream, write.event))
        covers = template.direct and event not in stream.masked
        for place in template.writes:
            access, box = operands[place], boxes[place]
            if not on_chip[access.tensor]:
                continue
            if access.kind == ACCUMULATE and adds:
                covers = False
            exact = template.operands[place].layout.boxes[0] if covers else None
            if exact is not None:
                current[access.tensor] = _remaining(flow, current[access.tensor], exact, event, access)
            if box is not None:
                current[access.tensor].append(_Write(event, access, box))
    return flow


def _boxes(template: Template) -> list[Box | None]:
    """Return the box that encloses each operand, in the dims of its tensor; None for the whole tensor."""
    return [operand.layout.boxes[1] if operand.dynamic is None else None for operand in template.operands]


def _remaining(flow: _Flow, writes: list[_Write], exact: Box, event: int, access: Access) -> list[_Write]:
    """Return the earlier writes that a write of the box `exact` leaves in part."""
    kept = []
    for write in writes:
        if contains(exact, write.left):
            if not write.is_read:
                flow.overwritten.append((write, event, access))
            continue
        write.left = _cut(write.left, exact)
        kept.append(write)
    return kept


def _cut(box: Box, exact: Box) -> Box:
    """Return what is left of a box without another one, where that is a box; else the whole box."""
    apart = [
        axis for axis, (one, other) in enumerate(zip(box, exact)) if one[0] < other[0] or other[1] < one[1]
    ]
    if len(apart) != 1 or not meets(box, exact):
        return box
    axis = apart[0]
    (first, end), (start, stop) = box[axis], exact[axis]
    if start <= first:
        shorter = (stop, end)
    elif stop >= end:
        shorter = (first, start)
    else:
        return box
    return (*box[:axis], shorter, *box[axis + 1 :])


def _has_other_effects(stream: Stream, event: int) -> bool:
    """Return whether an event changes more than tiles: registers, generators, other cores, HBM."""
    plan = stream.template(event).plan
    return plan.state is not None or plan.rendezvous is not None


def _live(stream: Stream, accesses: list[tuple[Access, ...]], flow: _Flow) -> set[int]:
    """Return the events whose results reach HBM, a register or another core."""
    live: set[int] = set()
    for event in range(len(accesses) - 1, -1, -1):
        leaves = any(
            access.kind != READ and stream.tensors[access.tensor].buffer not in _ON_CHIP
            for access in accesses[event]
        )
        if event in live or leaves or _has_other_effects(stream, event):
            live.add(event)
            live |= flow.producers.get(event, set())
    return live


_ON_CHIP = (MemoryRegion.sbuf, MemoryRegion.psum)


def _overwritten(stream: Stream, flow: _Flow, live: set[int]) -> list[Finding]:
    lost: dict[int, int] = defaultdict(int)  # by event, its writes that were overwritten unread
    for write, _, _ in flow.overwritten:
        lost[write.event] += 1
    used_lines = {stream.line_ids[event] for event in live}
    findings: list[Finding] = []
    said: set[int] = set()
    for write, event, access in flow.overwritten:
        line = stream.line_ids[event]
        if line in said or lost[write.event] < len(stream.template(write.event).writes):
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
    stream: Stream, flow: _Flow, live: set[int], first: int, second: int, used_lines: set[int]
) -> bool:
    """Return whether an overwritten result is a loss, and not a value that is reset or exists elsewhere."""
    one, other = stream.template(first), stream.template(second)
    if not one.plan.reads or _has_other_effects(stream, first):
        return False
    copies = one.plan.effects.copies and other.plan.effects.copies
    sums = one.plan.effects.sums_products and other.plan.effects.sums_products
    if sums or (copies and one.operands[one.writes[0]].layout is other.operands[other.writes[0]].layout):
        return False  # `stale` judges these by their bytes
    again = stream.line_ids[first] == stream.line_ids[second]
    moved = _is_move(one) or not other.plan.reads or (stream.line_ids[first] in used_lines and not again)
    if not moved:
        return True
    # The last round of a loop may prepare values for a round that does not come. Nothing is lost unless an operand's
    # own instruction becomes useless with it.
    return any(producer not in live for producer in flow.producers.get(first, ()))


def _source(stream: Stream, event: int) -> tuple[int, str]:
    return stream.line_ids[event], stream.template(event).op


def _is_move(template: Template) -> bool:
    """Return whether an instruction only copies one tile, which still contains the values."""
    plan = template.plan
    return plan.compute is unchanged or plan.effects.copies


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


def _unused(stream: Stream, accesses: list[tuple[Access, ...]], flow: _Flow) -> list[Finding]:
    """Return findings for results that nothing reads, unless a result of the same line is read in another round."""
    findings: list[Finding] = []
    said: set[int] = set()
    known = flow.read_sources | {_source(stream, write.event) for write, _, _ in flow.overwritten}
    for event, operands in enumerate(accesses):
        template = stream.template(event)
        line = stream.line_ids[event]
        if (
            line in said
            or _source(stream, event) in known
            or not template.plan.reads
            or not template.writes
            or _has_other_effects(stream, event)
        ):
            continue
        writes = [operands[place] for place in template.writes]
        if any(stream.tensors[access.tensor].buffer not in _ON_CHIP for access in writes):
            continue
        said.add(line)
        record = stream.tensors[writes[0].tensor]
        findings.append(
            found(
                UNUSED,
                f"nothing reads {record.name} {record.shape} {record.dtype}, which {stream.event(event).op} writes",
                stream.event(event).where,
                (touch(stream, event, writes[0]),),
                hint="use the tile where its result was meant to go, or drop the instruction",
            )
        )
    return findings
